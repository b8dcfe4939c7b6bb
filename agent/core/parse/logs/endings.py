"""How a log ends: whether the work went on after an error that a line only mentions.

Owns the reading of a log's last lines.  An error ends a run, or the run ends well: what is printed
last is then a word of success, and no line of trouble comes after it.  Steps are counted by
progress.py.  Pure; reads a bounded number of lines.
"""

from __future__ import annotations

import re

from .forms import INFO, LOUD, PLAIN, bare, form
from .lines import clean
from .tracebacks import TRACEBACK

LINES = 12  # of a log's end
BYTES = 16 << 10
# Not `finished`, `done` or `completed`: a script says so of any end.
_WELL = re.compile(
    r"(?i)\b(?:successful(?:ly)?|succe(?:eded|ss)|recovered|restored|reconnected|re-?established|"
    r"resumed|back (?:up|online|to normal)|healthy|saved|(?:up and|all) running|is (?:up|alive)|"
    r"link becomes ready|(?:re)?mounted|using network)\b"
)
_NOT_WELL = re.compile(
    r"(?i)\b(?:not|never|un\w{2,20}able|without|n.t|no longer|incomplete|before|until|"
    r"wait\w*|fail\w*|error\w*|exit\w*|terminat\w*|kill\w*|shut\w*|stop\w*|clos\w*|abort\w*|"
    r"clean\w*|teardown|tear\w*|destroy\w*|cancel\w*|interrupt\w*|drain\w*|evict\w*|delet\w*|"
    r"remov\w*|releas\w*|unschedul\w*|pending|back-?off|restart\w*|dump\w*|traceback|exception|"
    r"crash\w*|lost|timed out|timeout|refus\w*|den\w+|invalid|missing|cannot|could|unable|panic|"
    r"fatal)\b"
)


# Small tools of a job's script, which goes on below a line of theirs.
_ASIDE = re.compile(
    r"^(?:\S{1,200}: line \d+: )?(?:/\S{0,200}/)?(?:mkdir|rm|rmdir|cp|mv|ls|ln|cat|cd|chmod|chown|"
    r"touch|tput|stty|kill|pkill|which|du|df|find|grep|sed|awk|head|tail|wc|module|ml|activate|"
    r"deactivate|conda|source|ulimit|nvidia-smi|rocm-smi|hostname|date|git|xauth)\b\S{0,200}:"
    r"|^\S{1,200}: line \d+: \S{0,200}/(?:activate|conda\.sh|\w{0,20}rc|profile)\b"
    r"|^/etc/profile\S{0,80}: |^module load: |^Lmod has detected|^fatal: not a git repository"
)


def outlived(text: str, data: bytes, start: int) -> bool:
    """Whether a script went on below a complaint of one of its small tools."""
    if _ASIDE.match(text) is None:
        return False
    below = data.find(b"\n", start)
    lines = data[below + 1 : below + 1 + BYTES].split(b"\n") if below >= 0 else []
    return any(_ordinary(line) for line in lines if line.strip())


def _ordinary(line: bytes) -> bool:
    text = bare(clean(line.decode("utf-8", "replace")).text)
    said = form(text)
    if TRACEBACK in text or said.level == LOUD or said.ends:
        return True  # what came of it, or something else: in either case it says more
    return _ASIDE.match(text) is None and _NOT_WELL.search(text) is None


def ends_well(data: bytes, start: int) -> bool:
    """Whether the lines after the one that begins at `start` end with a sign of work."""
    below = data.find(b"\n", start)
    if below < 0:
        return False
    begin = max(below + 1, len(data) - BYTES)
    lines = [line for line in data[begin:].split(b"\n") if line.strip()][-LINES:]
    for line in reversed(lines):
        verdict = _sign(line)
        if verdict is not None:
            return verdict
    return False


def _sign(line: bytes) -> bool | None:
    """True for work, False for trouble, None for neither."""
    read = clean(line.decode("utf-8", "replace"))
    text = bare(read.text)
    said = form(read.text)
    if TRACEBACK in text or said.level == LOUD or said.ends:
        return False
    if said.goes_on:
        return True
    if _NOT_WELL.search(text) is not None:
        return None if said.level == INFO else False
    return True if said.level in (INFO, PLAIN) and _WELL.search(text) is not None else None
