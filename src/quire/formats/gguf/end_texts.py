"""Texts of special tokens of GGUF models, and which of them end an answer: those of llama.cpp (llama-vocab.cpp).

Converters write any type for them, control, user-defined or normal:
as in llama.cpp the text alone counts, also where a prompt spells it.
"""

ENDS = frozenset((  # texts that end an answer
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
# Tokens of code models that end an answer, by the key that may name another one instead of these texts.
CODE_ENDS: dict[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Tokens that all stand beside an end in vocabularies where that ends a message or nothing, but no answer.
NO_ENDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("<|end|>", frozenset(("<|return|>", "<|call|>"))),  # gpt-oss
    ("<|end|>", frozenset(("<|return|>", "<|calls|>"))),
    ("<|end|>", frozenset(("<|flush|>", "<|call|>"))),
    ("<|end|>", frozenset(("<|flush|>", "<|calls|>"))),  # Solar Open
    ("</s>", frozenset(("<|tool_response>",))),          # Gemma 4
)
# Other texts of special tokens: what code models have around the parts of a file.
_CODE_PARTS = (
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
    "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
    "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>",
    "▁<MID>", "<|code_middle|>", "<|middle|>",
)  # fmt: skip
CONTROL_TEXTS = ENDS.union(_CODE_PARTS, *CODE_ENDS.values())
