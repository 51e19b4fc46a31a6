"""Packs conversations into a network's rows: which conversations share a pass, and the place of every token. No torch.

The conversations of a group begin with the same prompt, which is computed once. Each answer continues as if it were
alone: its positions follow the prompt's, and it attends to the prompt and itself only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

ROW = 256  # tokens of a row unless a block is longer: attention's work grows with the square of a row's length


@dataclass(frozen=True)
class Packed:
    """Blocks of conversations in B rows of W places. Prompt 5 6 with the answers 7 8 and 9, of one group:

    ids        5 6 7 8 9        segments   0 0 1 1 2 positions  0 1 2 3 2        blocks     0 0 0 0 0 sources    1 2
    places whose logits are needed: after "5 6", and after "5 6 7" takes      0 1 0            for each sampled token,
    the index into `sources` that predicts it scored     2 3 6            the sampled tokens' indices in the tokens of
    all conversations: 5 6 7 8 5 6 9
    """

    ids: np.ndarray  # int64 [B, W]
    positions: np.ndarray  # int64 [B, W], or [B, W, 3] of models that see rows and columns
    order: np.ndarray  # int64 [B, W], a token's index in its conversation
    blocks: np.ndarray  # int64 [B, W], -1: empty
    segments: np.ndarray  # int64 [B, W], 0: shared by the block
    sources: np.ndarray  # int64 [U], places in all rows
    takes: np.ndarray  # int64 [M]
    scored: np.ndarray  # int64 [M]


@dataclass(frozen=True)
class PromptBlock:
    """Conversations, by number, whose first `shared` tokens are equal and computed once."""

    members: tuple[int, ...]
    shared: int
    size: int  # tokens


def lay_out(
    tokens: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
    groups: np.ndarray,
    row: int = ROW,
    wide: float = math.inf,
    token_positions: np.ndarray | None = None,
) -> Packed:
    """Packs these conversations into rows. `tokens` and `mask` [n] (False for the env's tokens) hold them one after the
    other. Conversations of a group share their common beginning; `wide` as for `split_cheaply`. `token_positions` are
    [n], or [n, 3] on several axes; None: a token's index in its conversation."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if mask[starts].any():
        raise ValueError("a conversation begins with a sampled token, whose probability is unknown")
    token_numbers = np.arange(len(tokens)) - np.repeat(starts, lengths)
    token_positions = token_numbers if token_positions is None else token_positions
    whole = blocks_of(tokens, mask, lengths, groups)
    parts = [span for block in whole for span in split_cheaply(block, lengths, wide)]
    row = max([row, *(block.size for block in parts)])
    bins = fill_rows([block.size for block in parts], row)
    shape = len(bins), max(sum(parts[number].size for number in numbers) for numbers in bins)
    ids, segments = (np.zeros(shape, np.int64) for _ in range(2))
    positions = np.zeros((*shape, *token_positions.shape[1:]), np.int64)
    blocks, place = np.full(shape, -1, np.int64), np.empty(len(tokens), np.int64)
    order = np.zeros(shape, np.int64)
    for at, numbers in enumerate(bins):
        column = 0
        for number in numbers:
            block = parts[number]
            for segment, begin, end in parts_of_block(block, starts, ends):
                span = slice(column, column + end - begin)
                ids[at, span], blocks[at, span], segments[at, span] = tokens[begin:end], number, segment
                positions[at, span], order[at, span] = token_positions[begin:end], token_numbers[begin:end]
                place[begin:end] = at * shape[1] + np.arange(span.start, span.stop)
                column = span.stop
            for member in block.members[1:]:
                prompt = slice(starts[member], starts[member] + block.shared)
                first = starts[block.members[0]]
                place[prompt] = place[first : first + block.shared]
    scored = np.flatnonzero(mask)
    sources, takes = np.unique(place[scored - 1], return_inverse=True)
    return Packed(ids, positions, order, blocks, segments, sources, takes.reshape(-1), scored)


def parts_of_block(block: PromptBlock, starts: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields the parts of a block as (segment, first token, end): the shared part, then each member's."""
    first = starts[block.members[0]]
    if block.shared:
        yield 0, first, first + block.shared
    for segment, member in enumerate(block.members, 1):
        yield segment, starts[member] + block.shared, ends[member]


def into_passes(
    tokens: np.ndarray, mask: np.ndarray, lengths: np.ndarray, groups: np.ndarray, most: int
) -> list[list[int]]:
    """Returns the conversations, by number, of each pass: at most `most` tokens, whole groups if they fit. Larger
    groups are split, and a longer conversation has its own pass."""
    parts = [piece for block in blocks_of(tokens, mask, lengths, groups) for piece in split_block(block, lengths, most)]
    bins = first_fit([piece.size for piece in parts], most)
    return sorted(sorted(member for number in numbers for member in parts[number].members) for numbers in bins)


def blocks_of(tokens: np.ndarray, mask: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> list[PromptBlock]:
    """The groups in order of their first member; conversations that share nothing are separate blocks."""
    starts = np.cumsum(lengths) - lengths
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(number)
    blocks = []
    for numbers in members.values():
        shared = shared_prompt(tokens, mask, starts[numbers], lengths[numbers])
        for some in [tuple(numbers)] if shared else [(number,) for number in numbers]:
            blocks.append(PromptBlock(some, shared, size_of(some, shared, lengths)))
    return blocks


def split_cheaply(block: PromptBlock, lengths: np.ndarray, wide: float) -> list[PromptBlock]:
    """Splits a block into the number of parts with the lowest cost; each part repeats the prompt. A place costs 1, plus
    1 for every `wide` places of its block (attention)."""
    ways, count = [], 1
    while count <= len(block.members):
        members = [tuple(some.tolist()) for some in np.array_split(np.array(block.members), count)]
        ways.append([PromptBlock(some, block.shared, size_of(some, block.shared, lengths)) for some in members])
        count *= 2
    return min(ways, key=lambda parts: sum(piece.size * (1 + piece.size / wide) for piece in parts))


def size_of(members: tuple[int, ...], shared: int, lengths: np.ndarray) -> int:
    return shared + int((lengths[list(members)] - shared).sum())


def shared_prompt(tokens: np.ndarray, mask: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> int:
    """The number of tokens, none sampled, with which several conversations begin alike."""
    if len(starts) < 2:
        return 0
    most = int(lengths.min())
    at = starts[:, None] + np.arange(most)
    same = (tokens[at] == tokens[at[:1]]).all(axis=0) & ~mask[at].any(axis=0)
    return most if same.all() else int(same.argmin())


def split_block(block: PromptBlock, lengths: np.ndarray, most: int) -> Iterator[PromptBlock]:
    """Splits a block into parts of at most `most` tokens that repeat the prompt; a longer conversation is a part of its
    own."""
    some: list[int] = []
    size = block.shared
    for member in block.members:
        rest = int(lengths[member]) - block.shared
        if some and size + rest > most:
            yield PromptBlock(tuple(some), block.shared, size)
            some, size = [], block.shared
        some.append(member)
        size += rest
    yield PromptBlock(tuple(some), block.shared, size)


def first_fit(sizes: Sequence[int], most: int) -> list[list[int]]:
    """First-fit decreasing: returns the indices of `sizes` in bins that hold `most`."""
    bins: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        at = next((at for at, left in enumerate(room) if sizes[number] <= left), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(most)
        bins[at].append(number)
        room[at] -= sizes[number]
    return bins


def fill_rows(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Returns the indices of `sizes` in the fewest rows that hold `most`, about equally full, since all rows are as
    wide as the fullest."""
    count = -(-sum(sizes) // most)
    rows: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for number in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        at = load.index(min(load))
        rows[at].append(number)
        load[at] += sizes[number]
    return [numbers for numbers in rows if numbers]
