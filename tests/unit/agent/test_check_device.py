"""Known answers and collective operations, beside torch on the processor."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from holdfast.agent.checks import collectives, device  # noqa: E402


@pytest.mark.parametrize("copies", [1, 5])
def test_a_flipped_bit_is_caught_a_hundred_times_of_a_hundred(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small products, which are the dear part; test_check.py flips one in whole ones."""
    monkeypatch.setattr(device, "_multiprocessors", lambda _: copies)
    monkeypatch.setattr(device, "INTEGER_SIZE", 64)
    monkeypatch.setattr(device, "FLOAT_SIZE", 64)
    caught = [device.known_answers("cpu", device.flipped(seed)) for seed in range(100)]
    assert [len(one) for one in caught] == [4] * 100  # in integers and others of both types
    assert all("1 of " in said and "results differ" in said for one in caught for said in one)


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_every_bit_may_be_the_one_that_flips(of: torch.dtype) -> None:
    flip, zeros = device.flipped(1), torch.zeros(4, dtype=of)
    found = {int(device._bits(flip(zeros)).sum()) for _ in range(2000)}
    wide = 8 * zeros.element_size()
    assert len(found) == wide and -(2 ** (wide - 1)) in found  # the sign among them


@pytest.mark.parametrize("of", ["float32", "bfloat16"])
def test_an_error_that_each_product_has_is_caught_in_both_types(
    monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    right = torch.Tensor.__matmul__

    def wrong(a: object, b: object) -> object:
        found = right(a, b)
        return -found if found.dtype == getattr(torch, of) else found

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    words = "integers" if of == "float32" else "integers as bfloat16"
    assert device.known_answers("cpu") == [f"cpu: a product of {words} is not the host's"]


ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later"


@pytest.mark.parametrize(("said", "whose"), [
    (ECC, "critical"),
    ("CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA`", "critical"),
    ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`", "unknown"),
    ("HIP error: an illegal memory access was encountered", "critical"),
    ("CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 1 has a total capacity", "unknown"),
    ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "unknown"),
    ("CUDA error: no kernel image is available for execution on the device", "unknown"),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "unknown"),
])
@pytest.mark.parametrize("check", ["tensor", "memory_bandwidth", "gemm", "host_copy"])
def test_a_device_whose_operation_raises_is_named_and_the_others_are_tested(
    monkeypatch: pytest.MonkeyPatch, check: str, said: str, whose: str
) -> None:
    """As torch tells it, and whose fault that is: a device that another job holds is not sick."""
    begun: list[str] = []
    works = {"tensor": "known_answers", "memory_bandwidth": "_copied", "gemm": "_multiplied",
             "host_copy": "_there_and_back"}[check]
    right = getattr(device, works)

    def raises(name: str, *rest: object) -> object:
        begun.append(name)
        if name == "cuda:1":
            raise RuntimeError(said)
        return right("cpu", *rest)

    monkeypatch.setattr(device, "devices", lambda: ["cuda:0", "cuda:1", "cuda:2"])
    monkeypatch.setattr(device, "_beginning", lambda name: name)
    monkeypatch.setattr(device, works, raises)
    answer = getattr(device, check)({})
    assert list(dict.fromkeys(begun)) == ["cuda:0", "cuda:1", "cuda:2"]
    first = said.split("\n")[0]
    assert answer[whose] == [f"cuda:1: {first}"]
    assert answer["unknown" if whose == "critical" else "critical"] == []
    if check != "tensor":
        assert len(answer["measures"]) == (4 if check == "gemm" else 2)  # of the two others


def test_a_device_is_sick_in_the_tests_between_nodes_as_well(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.agent.checks import peer_tests

    command = {"threads": 1, "seconds": 0.01}
    right = device.known_answers

    def raises(said: str) -> object:
        def known(name: str, flip: object = None) -> list[str]:
            if name == "cuda:1":
                raise RuntimeError(said)
            return right("cpu")
        return known

    monkeypatch.setattr(device, "devices", lambda: ["cuda:0", "cuda:1"])
    monkeypatch.setattr(device, "_beginning", lambda name: name)
    monkeypatch.setattr(peer_tests, "_sustained", lambda name, seconds: 5.0)
    monkeypatch.setattr(device, "known_answers", raises(ECC))
    found = peer_tests.compute(command, -1)
    assert found == {"wrong": ["cuda:1: CUDA error: uncorrectable ECC error encountered"],
                     "rate": 5.0}
    monkeypatch.setattr(device, "known_answers", raises("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="cuda:1: CUDA out of memory"):
        peer_tests.compute(command, -1)


def test_a_device_that_is_well_is_found_well() -> None:
    assert device.known_answers("cpu") == []


def test_the_same_error_twice_is_caught_against_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong in the same way each time, as a broken unit of a core is."""
    right = torch.Tensor.__matmul__

    def wrong(a: object, b: object) -> object:
        found = right(a, b)
        return found + 1 if found.dtype == torch.float32 else found

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert device.known_answers("cpu") == ["cpu: a product of integers is not the host's"]


def test_each_multiprocessor_gets_a_product_and_none_may_be_wrong(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is wrong in the same way each time, which a single product would not meet."""
    right, sick, shapes = torch.Tensor.__matmul__, 3, set()
    assert device._multiprocessors("cpu") == 1
    monkeypatch.setattr(device, "_multiprocessors", lambda _: 8)

    def wrong(a: object, b: object) -> object:
        found = right(a, b)
        shapes.add((str(found.dtype), tuple(found.shape)))
        if found.dtype == torch.float32:
            found[sick, 7, 9] += 1
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert device.known_answers("cpu") == ["cpu: a product of integers is not the host's"]
    assert shapes == {
        ("torch.int64", (device.INTEGER_SIZE,) * 2),  # the host's own, made once
        *((f"torch.{of}", (8, *(device.INTEGER_SIZE,) * 2)) for of in ("float32", "bfloat16")),
        *((f"torch.{of}", (8, *(device.FLOAT_SIZE,) * 2)) for of in ("float32", "bfloat16"))}


def test_as_many_repeats_as_it_takes_until_they_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def took(*seconds: float) -> list[float]:
        """What is counted when the repeats take these times, the first of which never is."""
        ticks = [0.0]
        for one in seconds:
            ticks += [ticks[-1], ticks[-1] + one]
        clock = iter(ticks[1:])
        monkeypatch.setattr(device.time, "perf_counter", lambda: next(clock))
        return [round(one, 3) for one in device._timed("cpu", lambda: None)]

    assert took(9, 1, 1, 1.05) == [1, 1, 1.05]
    assert took(9, 1, 2, 1, 1.02, 1.01, 5) == [1, 1.02, 1.01]
    assert len(took(*range(1, 11))) == device.REPEATS_MAX  # never alike


def test_zeros_of_both_signs_and_nan_are_told_apart() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert not device._same(zero, -zero) and device._same(nan, nan.clone())


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_what_each_rank_must_hold(n: int) -> None:
    """Against the definition of each operation, element by element."""
    count = 4 * n
    of = torch.int64
    sent = [collectives.pattern(rank, count, of) for rank in range(n)]
    parts = [collectives.pattern(rank, count // n, of) for rank in range(n)]
    total = torch.stack(sent).sum(0)
    assert all(one <= 256 for one in total.tolist())  # what bfloat16 holds exactly
    by_name = {one.name: one for one in collectives.OPERATIONS}
    for rank in range(n):
        def holds(name: str, want: object, rank: int = rank) -> bool:
            return bool(torch.equal(by_name[name].expected(rank, n, count, of), want))

        share = slice(rank * count // n, (rank + 1) * count // n)
        assert holds("all_reduce", total) and holds("all_gather", torch.cat(parts))
        assert holds("reduce_scatter", total[share])
        assert holds("all_to_all", torch.cat([one[share] for one in sent]))
        assert holds("broadcast", sent[0]) and holds("sendrecv", sent[rank - 1])


def test_the_factors_are_those_of_nccl_tests() -> None:
    assert {one.name: one.factor(8) for one in collectives.OPERATIONS} == {
        "all_reduce": 2 * 7 / 8, "all_gather": 7 / 8, "reduce_scatter": 7 / 8,
        "all_to_all": 7 / 8, "broadcast": 1.0, "sendrecv": 1.0}


def row(wrong: int, seconds: float) -> dict[str, object]:
    return {"op": "all_reduce", "bytes": 1 << 20, "count": 1 << 18, "type": "float",
            "redop": "sum", "root": -1, "wrong": wrong, "blocks": [seconds] * 5}


def test_rows_of_ranks_become_one_and_an_error_names_its_rank() -> None:
    good = collectives._answer([[row(0, 1e-3)], [row(0, 3e-3)]], 2, "cpu", 1.0)
    (measure,) = good["measures"]
    assert measure["value"] == pytest.approx((1 << 20) / 2e-3)  # the mean of the times, factor 1
    assert good["table"][-2].split() == [
        "1048576", "262144", "float", "sum", "-1", "2000.0", "0.52", "0.52", "0"]
    assert good["critical"] == [] and good["table"][-1].endswith("0 OK")
    bad = collectives._answer([[row(0, 1e-3)], [row(5, 1e-3)]], 2, "cpu", 1.0)
    assert bad["critical"] == ["all_reduce of float: 5 elements are wrong on rank 1"]
    assert bad["table"][-1].endswith("5 FAILED")


def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    def rank(number: int, *_: object) -> object:
        if number == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()

    monkeypatch.setattr(collectives, "_rank", rank)
    assert collectives.collectives({}) == {"unknown": ["rank 1: it died of SIGSEGV"]}
