"""Entry by file into the job's own interpreter: `python bootstrap.py run|train|rank ...`.

Owns the import path of worker/.  Holdfast may be installed in another interpreter than the job's;
its site-packages must never enter the job, so this file makes exactly one package importable,
`holdfast.worker`, from the folder it lies in.  What else of Holdfast the job's interpreter has
(the trainer, say) stays importable from there.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))


class WorkerFinder:
    """Finds `holdfast.worker` in this folder, whatever else is installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "holdfast.worker":
            return None
        return importlib.util.spec_from_file_location(
            name, os.path.join(HERE, "__init__.py"), submodule_search_locations=[HERE])


def prepare() -> None:
    """Makes `holdfast.worker` importable; leaves sys.path as `python SCRIPT` finds it."""
    if sys.path and os.path.abspath(sys.path[0] or ".") == HERE:
        del sys.path[0]
    sys.meta_path.insert(0, WorkerFinder)
    if importlib.util.find_spec("holdfast") is None:
        package = types.ModuleType("holdfast")
        package.__path__ = []
        package.__spec__ = importlib.machinery.ModuleSpec("holdfast", None, is_package=True)
        sys.modules["holdfast"] = package


def open_streams() -> None:
    """Gives a process that was started without a standard stream an empty one: its number would be
    the next file's, and what is written there would end up in that file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


def main() -> None:
    open_streams()
    prepare()
    if sys.version_info < (3, 9):
        sys.exit("holdfast: the job's Python is %s; 3.9 or newer is needed" % sys.version[:6])
    if sys.argv[1:2] == ["rank"]:
        from holdfast.worker.rank import spawn_entry

        spawn_entry.main(int(sys.argv[2]))
        return
    from holdfast.worker.launcher import launcher

    launcher.main(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
