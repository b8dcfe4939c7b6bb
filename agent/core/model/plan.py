"""The run's document, and where a generation starts from."""

from __future__ import annotations

from .observed import Labels
from .time import Value


class Resume(Value, frozen=True):
    """Where a generation starts from."""

    kind: str  # fresh | survivor | snapshot | disk | own (a script's own checkpoint)
    step: int = 0
    generation: int = 0  # of the state, for snapshot and disk
    path: str = ""


class Plan(Value, frozen=True):
    """The run's document: the one authority over members, ranks and the resume point."""

    run: str
    generation: int
    members: tuple[str, ...]
    ranks: tuple[tuple[int, str], ...]  # (rank, node)
    resume: Resume
    reason: str
    keep: tuple[int, ...] = ()  # ranks of processes that live on, at the place on their node
    spares: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()  # request ids
    spent: tuple[tuple[str, int], ...] = ()  # (budget key, count): inherited by a new leader
    history: tuple[tuple[int, int], ...] = ()  # (generation, step it resumed from), oldest first
    checkpoint_dir: str = ""  # whose commits the history judges
    other_histories: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()  # of other folders
    finished: int = -1  # exit code once the run is over, -1 = goes on
    paused: bool = False
    paused_since_wall_s: float = 0.0  # by the clock of who wrote it, as the next
    paused_until_wall_s: float = 0.0  # 0 = until a person ends it
    peak: int = 0  # highest step finished when it was made: what is beyond is its own progress
    quarantined: tuple[str, ...] = ()  # checkpoint paths that must not be used
    owner: int = -1  # user id of whose run it is; -1 unknown
    saves: bool = False  # ... and to write a checkpoint before
    park: str = ""  # why its ranks are to leave it at the end of a step; "" = they go on
    park_after: int = 0  # ... of this one: far enough ahead for every node to hear of it
    # Its nodes of which who leads hears nothing, lost or cut off; of a script's also those whose
    # ranks are to end.  They renew no permit.
    unheard: tuple[str, ...] = ()
    # Where the nodes of its ranks are in the network, for a trainer over several: labels, and the
    # nodes that have them.  () = nobody has any, or it was made by a release that tells none.
    labels: tuple[tuple[Labels, tuple[str, ...]], ...] = ()
    # The generation with which this submission of the run's name began: who comes back asks
    # whether it is still his that goes on.  0 = made by a release that does not tell.
    attempt: int = 0
