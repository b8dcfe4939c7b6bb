"""The forms in which programs say that something went wrong, whatever it was.

Owns the grammar of single lines: how loud a line is, which exception it ends with, whether a
process ends with it, and whether it says itself that the work goes on.  What the words mean is data
(agent/catalog/log_families.toml, read by families.py).  Pure; every pattern runs over a bounded
line and none repeats what itself repeats.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .tracebacks import exception

INFO, WARN, PLAIN, LOUD = range(4)
HEAD = 200  # characters in which a level stands
LINE_LOOKED = 2000

_LETTERS = {"T": INFO, "D": INFO, "V": INFO, "I": INFO, "N": INFO, "P": INFO, "W": WARN,
            "E": LOUD, "C": LOUD, "F": LOUD}
# glog and its kin: `E0102 03:04:05.6 file.cc:7]`, `[E528 08:52:46.1 file.cpp:1]`,
# `[E socket.cpp:4]`, `E tensorflow/core/x.cc:5]` behind a clock, Ray's `E 149 199]`, NeMo's.
_LETTER = re.compile(
    r"\[?(?P<a>[TDVIWECF])\d{3,4} \d\d:\d\d:|\[(?P<b>[IWEF]) [\w./-]{1,200}:\d+\]"
    r"|(?P<c>[DIWEF]) {1,2}\S{1,200}:\d+\]|(?P<d>[DIWECF]) \d{1,9} \d{1,9}\]"
    r"|\[NeMo (?P<e>[DIWE]) |(?:\[[^\]]{0,60}\] ){1,3}\[(?P<f>[DIWEF])\]"
    r"|[\w-]{1,30}\|[\w.-]{1,80}\|(?P<h>[CEWINPD])\|"  # Grid Engine's: thread, host, level
    r"|(?:[\w.-]{1,40}: )?\[(?P<g>[IWEF])\] "
)
# Of the communication libraries a WARN is the only word that they have for an error.
_TRANSPORT = re.compile(
    r"\b(?:NCCL|RCCL|FLAGCX|MCCL) (?P<a>INFO|WARN|ERROR|TRACE|ABORT)\b"
    r"|^\S{1,120}:\d+:\d+ \[\d+\] (?:\S{1,200} )?(?P<b>INFO|WARN|ERROR|TRACE) "
)
_LEVEL = re.compile(  # the kernel says INFO of what hangs, ZFS WARNING of what stops: no level
    r"(?:^|[\s\[|:(<>-])"
    r"(?:(?P<info>TRACE|DEBUG|INFO(?!: (?:task \S{1,60} blocked|rcu_))|NOTICE|NOTE)"
    r"|(?P<warn>WARN|WARNING(?!: (?:Pool|MMP) ))"
    r"|(?P<loud>ERROR|ERR|CRITICAL|FATAL|\*ERROR\*|LNetError|LustreError))(?=[\s\]|:)>,-]|$)"
)
_SMALL = re.compile(
    r"\b(?:level|severity)\"?[=:] ?\"?(?P<a>\w{1,10})|<(?P<b>trace|debug|info|warn|error|fatal)>"
    r"|\b(?P<c>debug|info|warning|error|fatal): |\[(?P<d>debug|info|warn|warning|error|fatal)\]"
)
_WORDS = {"trace": INFO, "debug": INFO, "info": INFO, "notice": INFO, "abort": LOUD, "warn": WARN,
          "warning": WARN, "error": LOUD, "fatal": LOUD, "critical": LOUD, "panic": LOUD}
_WARNED = re.compile(r"\b[A-Za-z]{0,40}Warning: |warnings\.warn\(|^Warning[:,!] |^\W{0,3}NOTE: ")
# Of Kubernetes, where Warning is the only error; a test's own result; a setting of a shell script.
_CALM = re.compile(
    r"\bNormal {2,}[A-Z][A-Za-z]|^\W{0,3}Normal [A-Z][A-Za-z]+ \d|^\++ \w|^(?:grep|dmesg|awk) [-|]"
    r"|\b(?:PASSED|SKIPPED|XFAIL)\b|\.\.\. ok$|\[ +(?:OK|RUN|PASSED) +\]"
    r"|^ok \d+\b|^(?:export|setenv|set) \w+[= ]"
    r"|^(?:\S{1,64} )?(?:kernel: )?(?:\[ *[\d.]{1,20}\] )?ACPI "
    r"|^(?:# (?!Out of)|// |[-*] fix|(?:logger|logging|log)\.\w+\(|print\(|except \w"
    r"|assert .{1,80}, [\"'])"
)
# Last words at a level that says nothing: of TensorFlow's coordinator, of OpenMMLab's commands.
_LAST_WORD = re.compile(
    r"INFO:tensorflow:Error (?:reported to Coordinator|recorded from (?!infeed|outfeed)\w{1,40}): "
    r"(?!.{0,160}(?:Cancelled|OutOfRange|[Cc]losed|exhausted|End of sequence))"
    r"|\bWARNING: command error: "
)
# An event of Kubernetes that a test or an operator quotes is as loud as it was.
_EVENT = re.compile(r"\{[a-z][\w-]{1,40}(?: \S{1,60})?\} (?:Failed\w{0,30}|Evicted|Preempted): ")
# `E   ` of pytest, `> ` and `- ` of quotations, Ray's daemons, and the class of what a task raised.
_QUOTED = re.compile(r"(?:[>|#*`-] ?|E {2,8}|\((?:raylet|gcs_server|autoscaler)\) ){1,12}")
_WRAPPED = re.compile(r"(?:[A-Za-z_]\w*\.){0,8}\w{1,80}\((?P<inner>[A-Za-z_]\w{1,80})\): ")
_PLAIN_WORD = re.compile(  # of any tool; Lustre's levels; conda's word about a shell
    r"(?:Timeout|Exit|Warning|Killed|Expired|Interrupt|Error|LNetError|LustreError):"
    r"|CommandNotFoundError: Your shell "
)
_PREFIXED = re.compile(
    r"(?P<before>\S.{0,80}?[\]|>:\d-])[ \t]{0,3}"
    r"(?P<rest>(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Exit|Expired)"
    r"(?::(?: .{0,20}|$)|$))"
)
_PREFIXED_ENDINGS = ("Error", "Exception", "Interrupt", "Exit", "Expired")
_NAMED = re.compile(
    r"\b(?!LNetError|LustreError)(?P<name>[A-Z]\w{1,60}(?:Error|Exception))(?:: |\()"
)
_RAISE = re.compile(
    r"^(?:.{0,120}[\]|>:] )?(?:-+> )?(?:\d+ |\[\d+\]\(\S{1,400}\) )? *"
    r"(?:raise (?P<name>(?:\w{1,80}\.){0,6}\w{1,80})|(?P<assert>assert) )"
)
_ENDS = re.compile(
    r"terminate called|^ *what\(\): |^\[?F\d{3,4} |^F \S|^\[F |\bCheck fail(?:ed|ure)\b"
    r"|^Fatal Python error|\bcore dumped\b|^fatal(?: error)?: "
)
GOES_ON = re.compile(
    # `Please retry`, `retry using another` ask it of the reader
    r"(?i)\b(?:retrying|(?<!please )retry(?! (?:with|using|later|your)\b)|"
    r"re-?trying|trying (?:to resume|again)|falling back|"
    r"(?<!\b0 )retries left(?!\W{0,3}0)|"
    r"fall(?:s)? ?back|fallback|ignor(?:ed|ing)|skipp(?:ed|ing)(?!:| iterations)|"
    r"recovered|continuing|"
    r"(?:will|would|may|might|could|can) fail (?:if|when|once|unless)|"
    r"using .{1,40} instead|using (?:the |a )?(?:default|slow|cpu)|not a failure|"
    r"not indicate an error|can (?:be )?(?:safely )?ignored?|defaulting to|starting from scratch|"
    r"will be (?:disabled|ignored|skipped|retried)|reconnect(?:ed|ing)|\d+ dropped|"
    r"(?:won.t|will not|does not|doesn.t|should not) (?:affect|matter|harm)|backing off|"
    r"(?:is|are) (?:not affected|unaffected)|"
    r"will (?:try|retry)|next (?:attempt|try|retry)|"
    r"(?:before|until) (?:the )?(?:next )?(?:retry|attempt|try)|"
    r"(?!0)\d{1,6} (?:attempts?|retries|tries) (?:left|remaining)|"
    r"(?<!uncorrected \()(?<!uncorrectable \()non-?fatal|not fatal|harmless|"
    r"(?:this|that|it|which) is (?:to be )?expected (?:when|if|with|without|on|during|behaviou?r)|"
    r"rebuilding (?:it|the|from|cache|index)|"
    r"(?:removed|dropp(?:ed|ing)|filter(?:ed|ing) out|exclud(?:ed|ing)|discard(?:ed|ing)) "
    r"(?:\d+|samples?|images?|rows?|records?|shards?)|succeeded after|"
    r"error caught was|just a warning|caught (?:an? )?(?:exception|error),|entering retry loop|"
    r"(?:restarted|recovered|resumed) successfully|successfully "
    r"(?:restarted|recovered|resumed|reconnected)|optional (?:dependency|module|import)|"
    r"going to \S{1,80} instead|error during autotuning|sleeping|"
    r"restarting (?:it|the (?:worker|actor|loader)))\b"
)
# Weaker words of that kind: a line that ends a process may well have them.
_MILD = re.compile(
    r"(?i)\btrying (?!to alloc)(?:with )?(?:[^\W_]{1,20}[ =_-]){0,3}\d|"
    r"[;,] using (?!.{0,40}(?:memory|[GM]i?B\b))\S|"
    r"\b(?!failing|crashing|hanging)[a-z]{3,12}ing (?:it |them )?again\b|"
    r"\bre-?(?:download|fetch|pull|read|build|creat|generat|comput)ing\b|"
    r"\((?:an )?optional\b|\bfilled with\b|"
    r"\bclipp(?:ed|ing) |\bwill resume\b|\bresumed (?:from|at|after)\b|\bsimulat(?:ed|ing)\b|"
    r"\binject(?:ed|ing) |\bexpected (?:failure|to fail|error)\b|\bas (?:it should|expected)\b"
)
_GIVES_UP = re.compile(
    r"(?i)max(?:imum)? retries|retry (?:count |counter |timeout )?exceeded|"
    r"retry count\b.{0,60} exceeded|retries exceeded|"
    r"exceeded error retry|after \d+ (?:retries|attempts|tries)|giving up|gave up|no more retries"
)
# What an exception says of its settings and of what it was given, and of no work.
_OF_SETTINGS = re.compile(
    r"(?i)\b(?:variables?|arguments?|options?|settings?|parameters?|flags?|keys?|values?)\b"
    r".{0,40}\bwill be ignored|\ball (?:\w{1,20} ){1,4}have been (?:ignored|skipped)\b"
)
# TensorFlow's own count below an error.
_NONE_IGNORED = re.compile(r"(?i)\b0 (?:\w{1,20} )?errors ignored")
_ATTEMPT = re.compile(
    r"(?i)\b(?:attempt|try|retry|retries)\b\W{0,3}"
    r"(?P<at>\d{1,6}) ?(?:/|of|out of) ?(?P<most>\d{1,6})"
)
_SAID_FIRST = re.compile(r"(?i)^\W{0,5}(?:failed|cannot|could not|couldn.t|unable) ")
_ADVISES = re.compile(
    r"(?i)\W{0,5}(?:(?:tip|hint)\b|if \w|when (?:you|the|a) |in case |expect a|should you )"
)
_SUPPOSED = re.compile(
    r"(?i)\b(?:may be|might be|will not|would not|if (?:an?|the|any|you)|at any time|in case of"
    r"|(?:can|could|may|might) (?:cause|lead|result)|to (?:avoid|prevent)|when you|should you)\b"
    r"|^\W{0,5}(?:check|remov|clean|delet|load|sav|sett|us|start|detect|test|validat|wait)ing\b"
    r"|(?<![\w.:])(?<!replica )(?<!rank )(?<!worker )(?<!node )(?<!device )"
    r"(?:no|0|zero) (?:corrupt|truncated|missing|invalid|bad|failed|stale)\b"
)


class Form(NamedTuple):
    """What the shape of one line says."""

    level: int  # INFO, WARN, PLAIN (none is written) or LOUD
    name: str  # last part of an exception's class, where the line is its; else ""
    ends: bool  # a process that prints such a line ends
    goes_on: bool  # it says that the work goes on
    supposed: bool = False  # it says what may be, at no level


def form(text: str) -> Form:
    """Of a line without colours, prefixes and clock."""
    text = bare(text)
    level = level_of(text)
    name = raised_name(text)
    ends = level >= PLAIN and (
        name != "" or _ENDS.search(text) is not None or _LAST_WORD.search(text) is not None)
    goes_on = says_it_goes_on(_OF_SETTINGS.sub("", text) if name else text, mildly=not ends)
    supposed = advises(text) or level == PLAIN and not ends and _is_supposed(text)
    return Form(level, name, ends, goes_on, supposed)


def says_it_goes_on(text: str, mildly: bool = False) -> bool:
    """Whether a line says that the work goes on, or counts an attempt that is not the last one."""
    if _GIVES_UP.search(text) is not None or _NONE_IGNORED.search(text) is not None:
        return False
    if GOES_ON.search(text) is not None or mildly and _MILD.search(text) is not None:
        return True
    counted = _ATTEMPT.search(text)
    return counted is not None and int(counted["at"]) < int(counted["most"])


def advises(text: str) -> bool:
    """Whether a line is advice from its begin: `If you see X, set Y`."""
    return _ADVISES.match(text) is not None


# What follows from what was just said: `the sum differs, the file may be corrupted`.
_CONCLUDES = re.compile(
    r"(?i)[,;] (?:so |and |thus |hence )?(?:(?:the|this|that|your) )?\w{1,20} "
    r"(?:may|might|could) be \w.*"
)


def _is_supposed(text: str) -> bool:
    """Advice below what failed takes nothing back: `Failed to mount. There might be ...`."""
    text = _CONCLUDES.sub("", text)
    first, _, _ = text.partition(". ")
    return _SUPPOSED.search(first if _SAID_FIRST.match(first) else text) is not None


def bare(text: str) -> str:
    """Without blanks around it and the marks of a quotation."""
    text = text[:LINE_LOOKED].strip()
    quoted = _QUOTED.match(text)
    return text[quoted.end() :] if quoted else text


def level_of(text: str) -> int:
    """The level that the line itself gives, in any of the common ways to write one."""
    head = text[:HEAD]
    if _EVENT.search(head):
        return PLAIN
    if _LAST_WORD.search(head):
        return LOUD
    if _CALM.search(head):
        return INFO
    if found := _LETTER.match(head):
        return _LETTERS[next(group for group in found.groups() if group)]
    if found := _TRANSPORT.search(head):
        return INFO if (found["a"] or found["b"]) in ("INFO", "TRACE") else LOUD
    if _WARNED.search(head):
        return WARN
    if found := _LEVEL.search(head):
        return INFO if found["info"] else WARN if found["warn"] else LOUD
    if found := _SMALL.search(head):
        word = next(group for group in found.groups() if group)
        return _WORDS.get(word.lower(), PLAIN)
    return PLAIN


def raised_name(text: str) -> str:
    """The exception's class, also of one that another wraps: `RayTaskError(ValueError): `, and
    behind the prefix of a tool that nobody here knows: `trainer_1  | ValueError: `."""
    if found := _WRAPPED.match(text):
        return found["inner"] if exception(f"{found['inner']}: ", False) else ""
    if _PLAIN_WORD.match(text):
        return ""
    if name := exception(text, False):
        return name
    if not any(ending in text for ending in _PREFIXED_ENDINGS):
        return ""
    found = _PREFIXED.match(text)
    if found is None or sum(word.isalpha() for word in found["before"].split()) > 1:
        return ""  # prose
    if _PLAIN_WORD.match(found["rest"]):
        return ""
    return exception(found["rest"], False)


def named(text: str) -> str:
    """An exception's class anywhere in a line: `main failed: ValueError: `, `KeyError('x')`."""
    found = _NAMED.search(text)
    return found["name"] if found else ""


_HEADED = re.compile(r"(?P<name>[A-Za-z_]\w{2,80}) {3,80}Traceback \(most recent call last\)")


def headed(text: str) -> str:
    """The class that a notebook writes above its traceback."""
    found = _HEADED.match(text.strip())
    return found["name"] if found else ""


def cut_off(text: str) -> str:
    """The class that a source line raises, where a traceback is cut before its last line."""
    found = _RAISE.match(text.strip())
    if found is None:
        return ""
    return "AssertionError" if found["assert"] else found["name"].rpartition(".")[2]
