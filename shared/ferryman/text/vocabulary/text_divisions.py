"""The divisions of texts before bytes are merged, by `tokenizer.ggml.pre` of a GGUF file.

source   the models' own tokenizers, under the names that llama.cpp gave them (ggml-org/llama.cpp,
         src/llama-vocab.cpp and conversion/base.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
_THREE_DIGITS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}"
_ONE_DIGIT = _THREE_DIGITS.replace("{1,3}", "")
_WITH_ACCENTS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
_BY_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_O200K = _BY_CASE % ((f"{_CONTRACTIONS}?",) * 2) + rf"|\p{{N}}{{1,3}}|{_SLASHED}"
_TEKKEN = _BY_CASE % ("", "") + rf"|\p{{N}}|{_SLASHED}"
_WITHOUT_HAN = "[%s&&[^\\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = (_WITHOUT_HAN % letters[1:-1] for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_MARKS}"
)
_SEED = _ONE_DIGIT.replace(r"\s\p{L}\p{N}]+[\r\n]*", r"\s\p{L}\p{N}\r\n]+")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDS}"
)
_THREES_FROM_THE_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = _ONE_DIGIT.replace(r"\s*[\r\n]+", r"\s*[\r\n]")


@dataclass(frozen=True, slots=True)
class TextDivision:
    """Patterns that divide a text, one after another within the pieces of the one before.

    With `takes_whole` a piece that is a token is not divided further. `begins` is True if a text
    begins with a token of its own unless the file says otherwise; `composes`: the text is put into
    Unicode's form NFC first.
    """

    patterns: tuple[str, ...]
    takes_whole: bool = False
    begins: bool = False
    composes: bool = False


_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿ"
    "ᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨ"
    "K-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲"
    "𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with cases of DeepSeek's first tokenizers; a later Unicode has more."""
_IDEOGRAPHS = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LLM = TextDivision(
    (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        _IDEOGRAPHS,
        r"\p{N}+",
    )
)
_DEEPSEEK_CODER = TextDivision(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}"),
)
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_HAN}"
_PLAIN = TextDivision((_GPT2,))
_DIGITS_APART = TextDivision((r"\p{N}", _GPT2))
_LLAMA3 = TextDivision((_THREE_DIGITS,), takes_whole=True, begins=True)
_LLAMA3_MERGED = TextDivision((_THREE_DIGITS,))
# "ignore_merges" of GLM 4.5: some tokens are reached by no merges (llama.cpp, src/llama-vocab.cpp).
_GLM = TextDivision((_THREE_DIGITS,), takes_whole=True)
_QWEN = TextDivision((_ONE_DIGIT,))
_O200K_DIVISION = TextDivision((_O200K,))
_DEEPSEEK3 = TextDivision((r"\p{N}{1,3}", _HAN, _DEEPSEEK))
_AYA = TextDivision((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))
_LING = TextDivision((_BAILING,))

DIVISIONS: Mapping[str, TextDivision] = {
    "gpt-2": _PLAIN,
    "olmo": _PLAIN,
    "mpt": _PLAIN,
    "phi-2": _PLAIN,
    "exaone4": _PLAIN,
    "gigachat": _PLAIN,
    "a.x-4.0": _PLAIN,
    "mellum": _PLAIN,
    "trillion": _PLAIN,
    "granite-docling": _PLAIN,
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "exaone": _DIGITS_APART,
    "minerva-7b": _DIGITS_APART,
    "mellum2": _DIGITS_APART,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "dbrx": _LLAMA3_MERGED,
    "smaug-bpe": _LLAMA3_MERGED,
    "glm4": _GLM,
    "glm5": _GLM,
    "chatglm-bpe": _LLAMA3_MERGED,
    "qwen2": TextDivision((_ONE_DIGIT,), composes=True),
    "qwen35": TextDivision((_WITH_ACCENTS,), composes=True),
    "deepseek-r1-qwen": _QWEN,
    "stablelm2": _QWEN,
    "hunyuan": _QWEN,
    "megrez": _QWEN,
    "kormo": _QWEN,
    "solar-open": _QWEN,
    "seed-coder": TextDivision((_SEED,)),
    "gpt-4o": _O200K_DIVISION,
    "llama4": _O200K_DIVISION,
    "minimax-m2": _O200K_DIVISION,
    "kanana2": _O200K_DIVISION,
    "tekken": TextDivision((_TEKKEN,), takes_whole=True, begins=True),
    "deepseek-v3": _DEEPSEEK3,
    "hy_v4": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "joyai-llm": _DEEPSEEK3,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": TextDivision((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "youtu": TextDivision((_YOUTU_SCRIPTS, _O200K.replace("{1,3}", "")), takes_whole=True),
    "kimi-k2": TextDivision((_KIMI,)),
    "tiny_aya": _AYA,
    "cohere2moe": _AYA,
    "laguna": TextDivision((r"[^\n]+|\n+", _ONE_DIGIT)),
    "exaone-moe": TextDivision((_EXAONE_MOE,)),
    "bailingmoe": _LING,
    "bailingmoe2": _LING,
    "afmoe": TextDivision((_THREES_FROM_THE_END, _ASIAN, _DEEPSEEK)),
    "default": TextDivision(
        (
            r"[\p{P}\$\+<=>\^~\|]+",
            _GPT2.removesuffix(r"|\s+"),
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        )
    ),
}
"""The division by `tokenizer.ggml.pre`."""
