"""Secrets in text that came from a job: passwords, tokens and keys, each replaced by ***.

Owns what counts as one.  An exception's text repeats whatever the job was doing: the address that
it could not reach, with user and password in it, or the header that it sent.  Such text is redacted
where it enters the agent, so that journal, store, evidence and incidents never hold it.  Rather too
much than too little; but the words of training (pad_token=0, tokens/s) stay.
"""

from __future__ import annotations

import re
from typing import Any

GONE = "***"
BEYOND = 1 << 14  # characters behind a cut that are looked at: a secret is shorter
TRAINING = ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "next", "special", "stop")
NO_TOKEN = "".join(f"(?<!{word}[_ -])" for word in TRAINING)
NAMES = (
    "password|passwd|passphrase|pwd|secret|credentials?|signature|api[_-]?key|access[_-]?key"
    f"|private[_-]?key|account[_-]?key|auth[_-]?key|security[_-]?token|{NO_TOKEN}token(?!s)"
)
QUOTE = r"\\*[\"']"  # escaped where text quotes text
VALUE = rf"(?P<quote>{QUOTE})(?:(?!(?P=quote))(?:\\.|[^\\\n]))*|[^\s\"'\\,;&<>(){{}}\[\]]+"
SCHEME = r"(?:basic|bearer|digest|token|negotiate|apikey|aws4-hmac-sha256)\s+"
SHAPES = (
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", r"\bgh[pousr]_\w{20,}", r"\bgithub_pat_\w{20,}",
    r"\bglpat-[\w-]{20,}", r"\bhf_[A-Za-z0-9]{20,}", r"\bsk-[\w-]{20,}", r"\bxox[abprs]-[\w-]{10,}",
    r"\bAIza[\w-]{30,}", r"\beyJ[\w-]{10,}\.[\w-]+(?:\.[\w-]*)?",
)
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END|\Z)", re.DOTALL)
# (expression, what stays before the secret is its group `stays`)
EXPRESSIONS = (
    re.compile(r"(?P<stays>://)[^\s/\"'\\]{1,1000}@"),
    re.compile(r"(?P<stays>(?<![\w.:-])[A-Za-z][\w.+-]{0,63}:)[^\s/@:\"'\\]{1,200}(?=@[\w])"),
    re.compile(rf"(?P<stays>\b(?:proxy-)?authorization{QUOTE}?\s*[:=]\s*(?:{QUOTE})?(?:{SCHEME})?)"
               r"[^\s\"'\\,]+", re.IGNORECASE),
    re.compile(rf"(?P<stays>\b(?:set-)?cookie{QUOTE}?\s*[:=]\s*(?:{QUOTE})?)[^\"'\\\n]+",
               re.IGNORECASE),
    re.compile(r"(?P<stays>\bbearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE),
    re.compile(rf"(?P<stays>(?:{NAMES})[\w-]{{0,20}}{QUOTE}?\]?\s*(?:=>|[:=])\s*)(?:{VALUE})",
               re.IGNORECASE | re.DOTALL),
    *(re.compile(f"(?P<stays>){shape}") for shape in SHAPES),
)
# One of these is in every text that holds a secret: a search for pieces costs next to nothing.
HINTS = (
    "@", "authorization", "cookie", "bearer", "passw", "passphrase", "pwd", "secret", "credential",
    "signature", "key", "token", "akia", "asia", "ghp_", "gho_", "ghu_", "ghs_", "ghr_",
    "github_pat_", "glpat-", "hf_", "sk-", "xox", "aiza", "eyj",
)
FLAG = re.compile(rf"-{{1,2}}[\w-]{{0,40}}(?:{NAMES})[\w-]{{0,20}}", re.IGNORECASE)
# Of a setting, whose whole name is known, and which may be as short as `auth`.
NAMED = re.compile(
    rf"{NAMES}|authorization|cookie|jwt|oauth|bearer|creds?(?![a-z])|webhook"
    r"|(?<![a-z])(?:auth|keys?|(?:db)?pass(?:code)?)(?![a-z])|tokens(?![a-z])")


def may_hold(text: str) -> bool:
    """Whether a closer look is worth it."""
    lowered = text.lower()
    return any(hint in lowered for hint in HINTS)


def redacted(text: str) -> str:
    """The text without its secrets."""
    if not may_hold(text):
        return text
    text = PRIVATE_KEY.sub(f"-----PRIVATE KEY {GONE}", text)
    for expression in EXPRESSIONS:
        text = expression.sub(_without, text)
    return text


def redacted_head(text: str, most: int) -> str:
    """The first `most` characters of the text without its secrets.  One that is cut in two is not
    known any more: of an address whose `@` is gone the password would stay."""
    return redacted(text[:most + BEYOND])[:most]


def _without(found: re.Match[str]) -> str:
    stays, quote = found["stays"], found.groupdict().get("quote") or ""
    if stays == "://":
        return f"://{GONE}@"
    if not quote and found[0][len(stays):].replace(".", "").isdigit() and "token" in stays.lower():
        return found[0]  # a number of tokens
    return f"{stays}{quote}{GONE}"


def redacted_value(value: Any, name: str = "") -> Any:
    """A setting without its secrets: a table, a list, a text or a number.  Names stay, and what
    stands under one that is a secret's goes whole, `name` being the one that it stands under."""
    if isinstance(value, dict):
        return {redacted(str(key)): redacted_value(one, name or _secret_name(str(key)))
                for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted_value(one, name) for one in value]
    if isinstance(value, str):
        return GONE if name and value else redacted(value)
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, (int, float)):
        return str(value)  # TOML has dates
    return GONE if name and "token" not in name and "key" not in name else value  # how many


def _secret_name(key: str) -> str:
    """The name, where it is a secret's; a tokenizer is none."""
    name = key.lower()
    return name if NAMED.search(name.replace("tokenizer", "")) else ""


def redacted_words(words: list[str]) -> list[str]:
    """A command line without its secrets, also where a flag and its value are two words."""
    found = [redacted(word) for word in words]
    for number, word in enumerate(words[:-1]):
        if FLAG.fullmatch(word) and not words[number + 1].startswith("-"):
            found[number + 1] = GONE
    return found
