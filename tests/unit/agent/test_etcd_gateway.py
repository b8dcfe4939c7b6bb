"""Which member of etcd is asked, without one."""

from __future__ import annotations

from types import SimpleNamespace

from holdfast.agent.store.etcd_gateway import Gateway

HOSTS = ("10.9.0.1", "10.9.0.2", "10.9.0.3")


def test_members_on_lost_hosts_are_passed_by_while_another_is_left() -> None:
    gateway, ended = Gateway(tuple(f"http://{host}:2379" for host in HOSTS)), []
    first, second, third = (one.split("/")[2].split(":")[0] for one in gateway.endpoints)

    def asked() -> str:
        return gateway.endpoints[gateway._first].split("/")[2].split(":")[0]

    streaming = SimpleNamespace(close=lambda: ended.append(first))
    gateway._streaming = gateway.endpoints[0], streaming  # type: ignore[assignment]
    gateway.avoid(frozenset({first, second}))
    assert asked() == third and ended == [first]
    gateway._next()
    assert asked() == third
    gateway.avoid(frozenset({first}))  # the second is back
    gateway._next()
    assert asked() == second
    gateway.avoid(frozenset(HOSTS))
    found = set()
    for _ in HOSTS:
        gateway._next()
        found.add(asked())
    assert found == set(HOSTS)  # better a lost one than nobody
