"""Entry by file into the Python that has torch: `python torch_entry.py DESCRIPTOR SPEC`.

Owns the one import of torch that all device checks share, and the search for a Python that has it:
one without becomes the next that the spec names.  Each check is called in a child of its own
(isolate.py); its answer, and what became of it, are lines of JSON to the descriptor.  Standard
library of Python 3.9 and torch: nothing else of Holdfast is here.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import json
import os
import sys
import types
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
WHAT_IS_HERE_S = 60.0  # eight GPUs without a persistent driver take half of it
PACKAGE = "holdfast_checks"  # this folder, under a name that nobody's installation has


def main(descriptor: int, spec: dict[str, Any]) -> None:
    if sys.path and os.path.abspath(sys.path[0] or ".") == HERE:
        del sys.path[0]  # else a check's file could stand for somebody's module
    package = types.ModuleType(PACKAGE)
    package.__path__ = [HERE]
    sys.modules[PACKAGE] = package
    isolate: Any = importlib.import_module(PACKAGE + ".isolate")
    isolate.HELD += spec.get("held", ())
    why = _why_not()
    if why:
        _next(descriptor, spec, why, isolate)
        return
    device: Any = importlib.import_module(PACKAGE + ".device")
    if device.kind() == "xla":
        device = importlib.import_module(PACKAGE + ".xla")
    # Asked in a child: what began a context could fork none that uses the device.
    here: dict[str, Any] = {}
    problem = ""
    ask = isolate.Call("what is here", isolate.answering(device.what_is_here), WHAT_IS_HERE_S)
    for event in isolate.run_all([ask], 1):
        here, problem = event.value or here, event.problem
    if problem or not here:
        for one in spec["calls"]:
            isolate.write_line(descriptor, {
                "check": one["name"], "ended": "torch does not tell its devices: %s" % problem,
                "took_s": 0.0})
        return
    isolate.write_line(descriptor, here)
    if spec.get("serve"):
        importlib.import_module(PACKAGE + ".peer_tests").serve(descriptor)
        return
    calls = []
    for one in spec["calls"]:
        module, function = one["place"].split(":")
        if here["kind"] == "xla" and module == "device":
            module = "xla"  # the same checks by compiled graphs
        place = importlib.import_module("%s.%s" % (PACKAGE, module))
        called = functools.partial(getattr(place, function), spec["options"])
        if spec["options"].get("warm") and here["kind"] != "xla":
            said = "nothing is compiled: torch uses %s" % here["kind"]
            called = functools.partial(dict, said=said)
        # A GPU's driver reserves addresses for all memory of all devices: no limit holds there.
        memory_bytes = one["memory_bytes"] if here["kind"] == "cpu" else 0
        calls.append(isolate.Call(one["name"], isolate.answering(called), one["deadline_s"],
                                  memory_bytes))
    answers: dict[str, Any] = {}
    for event in isolate.run_all(calls, 1):
        if event.ended:
            isolate.write_line(descriptor, {
                "check": event.name, "answer": answers.get(event.name), "ended": event.problem,
                "took_s": event.took_s})
        else:
            answers[event.name] = event.value


def _why_not() -> str:
    """Why torch is not to be had here; "" when it is imported."""
    if importlib.util.find_spec("torch") is None:
        return "no torch"
    gc.disable()  # 0.12 of 1.0 s of the import; nothing of it is garbage
    try:
        importlib.import_module("torch.distributed")
    except Exception as error:  # border of somebody's installation: whatever it raises is said
        return "%s: %s" % (type(error).__name__, str(error)[:200])
    gc.freeze()  # else the first collection in each child copies all of it
    gc.enable()
    return ""


def _next(descriptor: int, spec: dict[str, Any], why: str, isolate: Any) -> None:
    """Becomes the next Python, or says what was tried."""
    python, origin = spec["pythons"].pop(0)
    spec["tried"].append([python, origin, why])
    while spec["pythons"]:
        python, origin = spec["pythons"][0]
        try:
            os.execv(python, [python, os.path.abspath(__file__), str(descriptor), json.dumps(spec)])
        except OSError as error:
            spec["pythons"].pop(0)
            spec["tried"].append([python, origin, error.strerror])
    isolate.write_line(descriptor, {"no_torch": spec["tried"]})


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking torch's modules apart again is a tenth of a second, and all is said
