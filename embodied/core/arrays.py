"""Operations on arrays and observations, for all code between envs and policies.

Arrays are numpy between processes, and torch tensors if data stays on a device. These functions work with both and
import torch only for tensors. An observation is a dict of arrays, or of dicts of arrays (images by camera), whose first
axis counts env rows. Envs and policies use lists of texts for "instruction"; between them it is an array, so every leaf
is an array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

MOST_ROWS = 64  # more rows are padded to a multiple


def is_tensor(array: Any) -> bool:
    return hasattr(array, "detach")


def tensor_of(array: Any, device: torch.device | str) -> torch.Tensor:
    """The array as a tensor on this device, without a copy if it is already there. It may be read-only: never write to
    it."""
    import torch

    return torch.as_tensor(array).to(device)


def host(array: Any) -> np.ndarray:
    """The array as numpy; a tensor is copied from its device."""
    return array.detach().cpu().numpy() if is_tensor(array) else np.asarray(array)


def as_asked(answer: torch.Tensor, obs: dict[str, Any]) -> Any:
    """The answer as a tensor if the observation holds tensors, else as numpy."""
    first = next((array for array in (obs.get("state"), *obs.get("images", {}).values()) if array is not None), None)
    return answer if is_tensor(first) else host(answer)


def room_for(array: Any, count: int) -> Any:
    """Zeros for `count` rows of this array's shape and dtype, on its device."""
    shape = (count, *array.shape[1:])
    return array.new_zeros(shape) if is_tensor(array) else np.zeros(shape, array.dtype)


def copy_of(array: Any) -> Any:
    return array.clone() if is_tensor(array) else array.copy()


def as_type(array: Any, dtype: np.dtype) -> Any:
    """The array in this dtype, on its device."""
    if not is_tensor(array):
        return array.astype(dtype)
    import torch

    return array.to(getattr(torch, dtype.name))


def concatenate(arrays: Sequence[Any]) -> Any:
    if not is_tensor(arrays[0]):
        return np.concatenate(arrays)
    import torch

    return torch.cat(list(arrays))


def on_cpu(arrays: Sequence[Any]) -> list[Any]:
    """The arrays as numpy. Tensors are copied from their device in one transfer, in a type that holds every number."""
    tensors = [array for array in arrays if is_tensor(array)]
    if len(tensors) < 2:
        return [host(array) for array in arrays]
    numbers = host(concatenate([tensor.reshape(-1) for tensor in tensors]))
    sizes = [tensor.numel() for tensor in tensors]
    parts = iter(np.split(numbers, np.cumsum(sizes)[:-1]))
    return [next(parts).reshape(array.shape) if is_tensor(array) else np.asarray(array) for array in arrays]


def with_rows(array: Any, rows: np.ndarray, new: Any) -> Any:
    """An array [N] with these rows, a mask, taken from `new` [N]: a numpy array is written to, tensors are made on the
    device of `new`."""
    if not is_tensor(new):
        array[rows] = new[rows]
        return array
    return new if rows.all() else new.where(tensor_of(rows, new.device), tensor_of(array, new.device).to(new.dtype))


def side_by_side(columns: Sequence[Any]) -> Any:
    """Columns [N] as one array [N, len(columns)]."""
    if not is_tensor(columns[0]):
        return np.stack(columns, axis=1) if len(columns) > 1 else columns[0][:, None].copy()
    import torch

    return torch.stack(list(columns), dim=1)


def finite_rows(array: Any) -> np.ndarray:
    """bool [N]: rows without NaN and infinities. If a whole tensor is finite, only one number is copied from its
    device."""
    if not is_tensor(array):
        return np.isfinite(array).reshape(len(array), -1).all(axis=1)
    finite = array.isfinite()
    if bool(finite.all()):
        return np.ones(len(array), bool)
    return host(finite.reshape(len(array), -1).all(dim=1))


class FiniteChecks:
    """Finds rows of tensors with NaN or infinities. Results stay on the device until they are read for many decisions
    at once, since reading waits for all work of the device.

        checks.note("state", state)    in every decision
        checks.read()                  -> {"state": rows}, once for all
    """

    def __init__(self) -> None:
        self.wrong: dict[tuple[str, int], Any] = {}  # by name and N: [N], NaN for bad rows

    def note(self, what: str, array: Any, but: Any = None) -> None:
        """Rows in `but` (bool [N], a tensor) are ignored. Needs few GPU operations: zero times NaN or infinity is
        NaN."""
        wrong = (array * 0).reshape(len(array), -1).sum(dim=1)
        if but is not None:
            wrong = wrong.masked_fill(but, 0)
        key = what, len(array)
        self.wrong[key] = self.wrong[key] + wrong if key in self.wrong else wrong

    def read(self) -> dict[str, np.ndarray]:
        """By name, the rows with non-finite numbers since the last call; empty if everything was finite."""
        pending, self.wrong = self.wrong, {}
        results = ((what, np.isnan(rows)) for (what, _), rows in zip(pending, on_cpu([*pending.values()]), strict=True))
        return {what: np.flatnonzero(rows) for what, rows in results if rows.any()}


def training_state(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """A network's weights and its optimizer's tensors, as arrays for a checkpoint."""
    tensors = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    for number, kept in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in kept.items()}
    return {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}


def load_training_state(net: torch.nn.Module, optimizer: torch.optim.Optimizer, arrays: dict[str, np.ndarray]) -> None:
    """Continue from `training_state`."""
    tensors = {name: tensor_of(array.copy(), "cpu") for name, array in arrays.items()}
    net.load_state_dict({name[4:]: tensor for name, tensor in tensors.items() if name.startswith("net.")})
    kept: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, what = name.split(".", 2)
            kept.setdefault(int(number), {})[what] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": kept})


# "state": [N,D]; "images": {camera: uint8 [N,H,W,3]}; "instruction": N texts; "privileged": [N,P], for the
# learner only: no action may depend on it
Observation = dict[str, Any]


def map_obs(function: Callable, *observations: Observation) -> Observation:
    """The function's result for every leaf. With several observations it gets the leaves of the same name."""
    mapped: Observation = {}
    for name, array in observations[0].items():
        parts = [obs[name] for obs in observations]
        mapped[name] = map_obs(function, *parts) if isinstance(array, dict) else function(*parts)
    return mapped


def leaves(obs: Observation) -> Iterator[Any]:
    """All arrays (and lists of texts) of an observation."""
    for value in obs.values():
        yield from leaves(value) if isinstance(value, dict) else (value,)


def gather(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The values of each key: [("a", 1), ("b", 2), ("a", 3)] -> {"a": [1, 3], "b": [2]}"""
    values_by_key: dict[Any, list[Any]] = {}
    for key, value in pairs:
        values_by_key.setdefault(key, []).append(value)
    return values_by_key


def flat_dict(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """{"images": {"top": 1}} -> {"images.top": 1}"""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flat_dict(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return flat


def nested_dict(flat: dict[str, Any]) -> dict[str, Any]:
    """{"images.top": 1} -> {"images": {"top": 1}}"""
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *groups, leaf = name.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[leaf] = array
    return tree


def is_text(array: Any) -> bool:
    """True if a leaf holds texts, as a list or as an array."""
    return isinstance(array, list) or (isinstance(array, np.ndarray) and array.dtype.kind == "O")


def text_arrays(obs: Observation) -> Observation:
    """The observation with its texts as an array, as it is sent."""
    return map_obs(lambda array: np.array(array, object) if is_text(array) else array, obs)


def text_lists(obs: Observation) -> Observation:
    """The observation with its texts as a list, the form of envs and policies."""
    return map_obs(lambda array: list(array) if is_text(array) else array, obs)


def num_rows(obs: Observation) -> int:
    return len(next(leaves(obs)))


def padded_rows(rows: int) -> int:
    """1, 2, 4, 8, 16, 32, 64, or a multiple of 64."""
    return 1 << (rows - 1).bit_length() if rows <= MOST_ROWS else -(-rows // MOST_ROWS) * MOST_ROWS


def take_rows(obs: Observation, index: Any) -> Observation:
    """The rows of every array that an index selects."""
    return map_obs(lambda array: array[index], obs)


def join_rows(parts: Sequence[Observation]) -> Observation:
    """The rows of these observations, one after the other; a single one is returned as it is."""
    return parts[0] if len(parts) == 1 else map_obs(lambda *arrays: concatenate(arrays), *parts)


def write(buffer: Observation, index: Any, obs: Observation) -> None:
    """Write an observation into a preallocated one, at this index."""

    def put(array: Any, rows: Any) -> None:
        array[index] = rows

    map_obs(put, buffer, obs)
