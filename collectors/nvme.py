"""NVMe drives: which there are, whether their controllers live, and how warm they are, from sysfs.

Owns the readings that need no permission; wear and errors are SMART's (nvme_smart.py).  Runs in a
probe child, one thread a drive: the kernel asks the drive for its temperature, and a sick drive
does not answer.
"""

from __future__ import annotations

from functools import partial

from .contract import NODE_EXPORTER, SLOW, Metric, NoData, Probed, Roots, Sample
from .sources.files import is_count, names_in, word_of
from .sources.questions import Questions

FOLDER = "class/nvme"
DRIVES_MAX = 64
SENSORS_MAX = 9  # the drive's own and eight more
WAITING = Metric("host_nvme_waiting_seconds", "gauge",
                 "Age of a question that a drive has not answered; 0 when it answers.",
                 ("device", "question"), True)
LIMITS = {"crit": "critical", "max": "warning"}
Reading = tuple[str, str, float]  # name, more of the subject, value


class NvmeCollector(Probed):
    """State and temperature of every NVMe drive; read in a child."""

    name = "nvme"
    pace = SLOW
    metrics = (
        Metric("host_nvme_info", "gauge", "Always 1; which drive this is.",
               ("device", "model", "serial", "firmware"), False, NODE_EXPORTER),
        Metric("host_nvme_live", "gauge",
               "1 when the drive's controller is live, not resetting, not dead.",
               ("device", "state"), True),
        Metric("host_nvme_temperature_celsius", "gauge", "Temperature by sensor.",
               ("device", "sensor"), False, NODE_EXPORTER),
        Metric("host_nvme_temperature_limit_celsius", "gauge",
               "Temperature at which the drive warns, or slows down or stops.",
               ("device", "sensor", "limit"), False, NODE_EXPORTER),
        Metric("host_nvme_temperature_alarm", "gauge",
               "1 when the drive says that its temperature is out of range.",
               ("device", "sensor"), True),
        WAITING,
    )

    def __init__(self) -> None:
        self._questions: Questions[list[Reading]] = Questions()

    def here(self, roots: Roots) -> str:
        """"" with an NVMe drive."""
        return "" if drives(roots) else "no NVMe drive on this machine"

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without a drive."""
        names = drives(roots)
        if not names:
            raise NoData("no NVMe drive on this machine")
        calls = {name: partial(_drive, f"{roots.sys}/{FOLDER}/{name}") for name in names}
        found: list[Sample] = []
        for name, waited_s, answer in self._questions.round(calls, boot_s):
            waiting = f"device={name},question=sysfs"
            found.append(Sample(WAITING.name, waiting, waited_s, boot_s))
            if answer is not None:
                found += samples_of(name, answer.value or [], answer.boot_s)
        return found


def samples_of(drive: str, readings: list[Reading], boot_s: float) -> list[Sample]:
    """The readings of one drive under its name."""
    return [Sample(metric, f"device={drive},{more}".rstrip(","), value, boot_s)
            for metric, more, value in readings]


def drives(roots: Roots) -> list[str]:
    """Names of the controllers, `nvme0`, in their order."""
    numbers = [int(name[4:]) for name in names_in(f"{roots.sys}/{FOLDER}")
               if name[:4] == "nvme" and name[4:].isdecimal()]
    return [f"nvme{number}" for number in sorted(numbers)[:DRIVES_MAX]]


def _drive(folder: str) -> list[Reading]:
    """Everything of one drive."""
    info = (f"{key}={word_of(f'{folder}/{file}')}" for key, file in
            (("model", "model"), ("serial", "serial"), ("firmware", "firmware_rev")))
    found: list[Reading] = [("host_nvme_info", ",".join(info), 1.0)]
    state = word_of(f"{folder}/state")
    if state:
        found.append(("host_nvme_live", f"state={state}", float(state == "live")))
    for sensors in _hwmon(folder):
        for number in range(1, SENSORS_MAX + 1):
            found += _sensor(f"{sensors}/temp{number}")
    return found


def _hwmon(folder: str) -> list[str]:
    """Directly below the controller, or, before Linux 5.5's own driver, below its device."""
    for above in (folder, f"{folder}/device/hwmon"):
        for one in names_in(above):
            if one.startswith("hwmon") and one != "hwmon":
                return [f"{above}/{one}"]
    return []


def _sensor(path: str) -> list[Reading]:
    now = _number(f"{path}_input")
    if now is None:
        return []
    sensor = f"sensor={word_of(f'{path}_label') or path.rpartition('/')[2]}"
    found = [("host_nvme_temperature_celsius", sensor, now / 1000.0)]
    for suffix, limit in LIMITS.items():
        value = _number(f"{path}_{suffix}")
        if value is not None and 0.0 < value < 200_000.0:  # 65261 C is how a drive says "none"
            more = f"{sensor},limit={limit}"
            found.append(("host_nvme_temperature_limit_celsius", more, value / 1000.0))
    alarm = _number(f"{path}_alarm")
    if alarm is not None:
        found.append(("host_nvme_temperature_alarm", sensor, float(alarm > 0.0)))
    return found


def _number(path: str) -> float | None:
    """A whole number >= 0 that is the file's only content; None for anything else."""
    text = word_of(path)
    return float(text) if is_count(text) else None
