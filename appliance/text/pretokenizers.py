"""Pre-tokenizers: how a text is cut into pieces before byte-pair merging, by the name in `tokenizer.ggml.pre`.

A name says which regular expressions the model's own tokenizer applies, one after the other, each cutting the pieces that
the one before left. They are those of the models' published `tokenizer.json` files, in Oniguruma syntax; `docs/tokenizers.md`
lists the names. The few that cost quadratic time on long runs of digits are written as two linear steps with the same cuts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.errors import UnsupportedModelError

_SHORT_FORMS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE_SHORT_FORMS = rf"(?i:{_SHORT_FORMS})"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS_LINES_SPACE = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_SYMBOLS_PATHS_SPACE = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER_NOT_HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER_NOT_HAN = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"


def _cased_words(upper: str, lower: str, ending: str = "") -> str:
    """A word with its leading sign: capitals before small letters, at least one of either."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"


_GPT2 = rf"{_SHORT_FORMS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ANY_CASE_SHORT_FORMS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS_LINES_SPACE}"
_QWEN2 = rf"{_ANY_CASE_SHORT_FORMS}|{_LETTERS}|\p{{N}}|{_SYMBOLS_LINES_SPACE}"
_GPT4O = rf"{_cased_words(_UPPER, _LOWER, _ANY_CASE_SHORT_FORMS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS_PATHS_SPACE}"
_CJK = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_HAN_AND_HANGUL = r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_SIGN_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_V3 = rf"{_SIGN_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
_NOT_PUNCTUATION = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{0964}\x{06d4}\x{060c})]+"
_LINES = r"[^\n]+|[\n]+"

_THREES_FROM_THE_RIGHT = r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)|\p{N}{3}"
r"""Cuts a piece that is all digits as `\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))` would."""

_JAIS2_SPACE = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"

_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{00b5}\x{00c0}-\x{00d6}\x{00d8}-\x{00f6}\x{00f8}-\x{01ba}\x{01bc}-\x{01bf}\x{01c4}-\x{0293}\x{0295}-\x{02af}"
    r"\x{0370}-\x{0373}\x{0376}\x{0377}\x{037b}-\x{037d}\x{037f}\x{0386}\x{0388}-\x{038a}\x{038c}\x{038e}-\x{03a1}"
    r"\x{03a3}-\x{03f5}\x{03f7}-\x{0481}\x{048a}-\x{052f}\x{0531}-\x{0556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}"
    r"\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}"
    r"\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}"
    r"\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}"
    r"\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}"
    r"\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}"
    r"\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}"
    r"\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}"
    r"\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_DEEPSEEK_PUNCTUATION = r"!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}"
_YOUTU_SCRIPTS = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+"
    r"|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+"
    r"|[\x{3105}-\x{312f}]+"
    rf"|{_CJK}"
)
_AFMOE_SCRIPTS = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{309f}\x{30a0}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{0e40}-\x{0e7f}\x{0e80}-\x{0eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}"
    r"\x{1100}-\x{11ff}]+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family of models cuts text."""

    regexes: tuple[str, ...]
    """Applied in order; matches and what lies between them become pieces."""
    whole_pieces: bool = False
    """A piece that is itself a token is that token, whatever the merges say (`ignore_merges` elsewhere)."""
    adds_bos: bool = False
    """A prompt begins with the BOS token when the file does not say."""


_FAMILIES: tuple[tuple[PreTokenizer, tuple[str, ...]], ...] = (
    (
        PreTokenizer((_GPT2,)),
        (
            *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "exaone4", "trillion"),
            *("granite-docling", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
        ),
    ),
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), ("falcon",)),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), ("default",)),
    (
        PreTokenizer((_LLAMA3,), whole_pieces=True, adds_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ),
    (PreTokenizer((_LLAMA3,), whole_pieces=True), ("glm4", "glm5")),
    (PreTokenizer((_LLAMA3,)), ("dbrx", "smaug-bpe", "chatglm-bpe")),
    (
        PreTokenizer((r"\p{N}{1,3}", rf"{_ANY_CASE_SHORT_FORMS}|{_LETTERS}|\p{{N}}+|{_SYMBOLS_LINES_SPACE}"), whole_pieces=True),
        ("minicpm5",),
    ),
    (
        PreTokenizer(
            (rf"{_ANY_CASE_SHORT_FORMS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_JAIS2_SPACE}",),
        ),
        ("jais-2",),
    ),
    (
        PreTokenizer((_QWEN2,)),
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    ),
    (
        PreTokenizer(
            (
                rf"{_ANY_CASE_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}",
            )
        ),
        ("qwen35",),
    ),
    (PreTokenizer((_LINES, _QWEN2)), ("laguna",)),
    (PreTokenizer((rf"{_LETTERS}|\p{{N}}|{_SYMBOLS_LINES_SPACE}",)), ("ufakzeka",)),
    (
        PreTokenizer((rf"{_ANY_CASE_SHORT_FORMS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}",)),
        ("seed-coder",),
    ),
    (
        PreTokenizer((r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)),
        ("bailingmoe", "bailingmoe2", "llada-moe"),
    ),
    (
        PreTokenizer(
            (
                rf"{_ANY_CASE_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        ("exaone-moe",),
    ),
    (PreTokenizer((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")),
    (PreTokenizer((_GPT4O,), whole_pieces=True), ("granite-embed-multi-97m",)),
    (
        PreTokenizer((r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})+\z)|\d{3}", _GPT4O)),
        ("tiny_aya", "cohere2moe"),
    ),
    (
        PreTokenizer((rf"{_cased_words(_UPPER, _LOWER)}|\p{{N}}|{_SYMBOLS_PATHS_SPACE}",), whole_pieces=True, adds_bos=True),
        ("tekken",),
    ),
    (
        PreTokenizer(
            (
                rf"\p{{Han}}+|{_cased_words(_UPPER_NOT_HAN, _LOWER_NOT_HAN, _ANY_CASE_SHORT_FORMS + '?')}"
                rf"|\p{{N}}{{1,3}}|{_SYMBOLS_LINES_SPACE}",
            )
        ),
        ("kimi-k2",),
    ),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
                r"\s+$",
                _HAN_AND_HANGUL,
                r"\p{N}+",
            )
        ),
        ("deepseek-llm",),
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")), ("deepseek-coder",)),
    (PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3)), ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4")),
    (
        PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_SIGN_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
        ("spark2_5",),
    ),
    (
        PreTokenizer(
            (
                _YOUTU_SCRIPTS,
                rf"{_cased_words(_UPPER, _LOWER, _ANY_CASE_SHORT_FORMS + '?')}|\p{{N}}|{_SYMBOLS_PATHS_SPACE}",
            ),
            whole_pieces=True,
        ),
        ("youtu",),
    ),
    (PreTokenizer((r"\p{N}+", _THREES_FROM_THE_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK_V3)), ("afmoe",)),
    (PreTokenizer((r"\p{N}+", _THREES_FROM_THE_RIGHT)), ("superbpe",)),
    (PreTokenizer((_NOT_PUNCTUATION,)), ("poro-chat", "bloom", "gpt3-finnish")),
    (PreTokenizer((_NOT_PUNCTUATION, r"\p{N}")), ("viking",)),
    (
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            adds_bos=True,
        ),
        ("chameleon",),
    ),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for pre, names in _FAMILIES for name in names}
"""Every name that we can run."""

NOT_BYTE_LEVEL = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
"""Known names whose tokens are not made of bytes; not supported yet."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name. Raises UnsupportedModelError, with names that look alike."""
    found = PRE_TOKENIZERS.get(name)
    if found is not None:
        return found
    if name in NOT_BYTE_LEVEL:
        raise UnsupportedModelError(f"the pre-tokenizer {name!r} does not work on bytes; only byte-level tokenizers are supported so far")
    near = ", ".join(_near(name)) or "llama-bpe, qwen2, gpt-4o"
    raise UnsupportedModelError(
        f"unknown pre-tokenizer {name!r} in tokenizer.ggml.pre, so the text would be split wrongly; known names like it: {near}"
    )


def _near(name: str) -> Iterator[str]:
    yield from difflib.get_close_matches(name.lower(), PRE_TOKENIZERS, n=5, cutoff=0.5)
