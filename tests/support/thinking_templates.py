"""Chat templates with the behaviour of Qwen3's and R1's: they leave out thoughts of earlier turns."""

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from embodied.policies.language.tokenizer import ConversationTokenizer

# Thoughts after the last question stay; without thinking, a prompt ends with an empty thought.
QWEN3 = """{%- set at = namespace(asked=0) -%}
{%- for m in messages if m.role == 'user' %}{% set at.asked = messages.index(m) %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set parts = m.content.split('</think>') -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > at.asked and parts | length > 1 -%}
{{- '<think>\n' + parts[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' -}}
{%- endif -%}
{{- parts[-1].lstrip('\n') + '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' -}}{% endif -%}
{%- endif -%}"""

# The prompt opens the thought; earlier answers are what follows it.
R1 = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|assistant|>' + m.content.split('</think>')[-1] + '<|im_end|>' -}}
{%- else -%}
{{- '<|' + m.role + '|>' + m.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' -}}{% endif -%}"""

MARKS = ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<|assistant|>", "<|user|>", "<|tool|>"]


def tokenizer_with(template: str, thoughts: str = "template", **arguments) -> ConversationTokenizer:
    """A tokenizer of bytes and some merged ones, with marks of its own as Qwen's."""
    fast = Tokenizer(BPE())
    fast.pre_tokenizer, fast.decoder = ByteLevel(add_prefix_space=False), Decoder()
    words = ["the answer is forty-two\n\n the answer! and more to think of, tool_response\n\n"] * 3
    alphabet = ByteLevel.alphabet()
    fast.train_from_iterator(words, BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    base = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=MARKS[0], clean_up_tokenization_spaces=False)
    base.chat_template = template
    tokenizer = ConversationTokenizer(base, [base.eos_token_id])
    tokenizer.use(None, arguments)
    tokenizer.prepare_turns(thoughts)
    return tokenizer
