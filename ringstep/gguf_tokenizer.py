"""A tokenizer.json built from the vocabulary inside a GGUF file."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ringstep.errors import RingstepError

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


def tokenizer_json(metadata: dict[str, Any], file: object) -> bytes | None:
    """Return tokenizer.json for a byte-level BPE vocabulary, None when the file has no vocabulary.

    Raises RingstepError naming the file and key for another kind of tokenizer or a damaged vocabulary.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    if kind != "gpt2":
        raise RingstepError(
            f"{file}: tokenizer.ggml.model {kind!r} is not supported, only 'gpt2' (byte-level BPE); "
            "put the model's own tokenizer.json beside the artifact"
        )
    tokens, merges = _strings(metadata, "tokens", file), _strings(metadata, "merges", file)
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or not isinstance(kinds, list):
        raise RingstepError(f"{file}: tokenizer.ggml.tokens has duplicates or no types; it is damaged")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception
        raise RingstepError(f"{file}: the merges do not fit the vocabulary ({str(error)[:80]})") from None
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, file)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    # In vocabulary order, so that every added token keeps its id.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=flag != USER_DEFINED, normalized=False)
            for token, flag in zip(tokens, kinds, strict=False)
            if flag in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    if metadata.get("tokenizer.ggml.add_bos_token"):
        index = metadata.get("tokenizer.ggml.bos_token_id")
        if type(index) is not int or not 0 <= index < len(tokens):
            raise RingstepError(f"{file}: tokenizer.ggml.bos_token_id {index!r} is not a token")
        bos = tokens[index]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, index)]
                ),
            ]
        )
    text: str = tokenizer.to_str(pretty=True)
    return text.encode("utf-8")


def _strings(metadata: dict[str, Any], key: str, file: object) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RingstepError(f"{file}: tokenizer.ggml.{key} is missing or not a list of strings")
    return value


def _pre_tokenizer(name: str, file: object) -> Any:
    """Return the splitter that llama.cpp means by `name`; RingstepError for one not known here."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's own regex
    if name in ("gpt-2", "gpt2"):
        return words
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    split = {"llama-bpe": LLAMA3_SPLIT, "llama3": LLAMA3_SPLIT, "qwen2": QWEN2_SPLIT}.get(name)
    if split is None:
        raise RingstepError(
            f"{file}: tokenizer.ggml.pre {name!r} is not known, only smollm, gpt-2, llama-bpe and qwen2; "
            "put the model's own tokenizer.json beside the artifact"
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
