"""Servers that fail in every way: what is asked again and where, what is given up, and who gets no more work."""

from __future__ import annotations

import asyncio
import email.utils
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chat_server import ChatServer, Misbehave, completion

from draftsmith.data import servers as module
from draftsmith.data.chat import AnswerSettings, reply
from draftsmith.data.conversations import Message
from draftsmith.data.servers import Refused, Servers, ServersGone, address

YES = Message("assistant", "yes", token_ids=(5, 2), finish_reason="stop")
OVERLOADED = Misbehave(503, "busy")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.2)


def ask(
    urls: Sequence[str], count: int = 1, each: int = 4, tries: int = 3, timeout: float = 5.0, patience: float = 2.0, model: str | None = None
) -> list[Message | Refused]:
    """`count` requests at once; refusals stand in their place."""

    async def run() -> list[Message | Refused]:
        async with Servers(urls, model, "secret", each, tries, timeout, patience) as servers:
            bodies = [{"model": servers.model, "n": i} for i in range(count)]
            found = await asyncio.gather(*(servers.post(b, lambda r: reply(r, AnswerSettings())[0]) for b in bodies), return_exceptions=True)
        for f in found:
            if isinstance(f, BaseException) and not isinstance(f, Refused):
                raise f
        return [f for f in found if isinstance(f, Message | Refused)]

    return asyncio.run(run())


def first(*faults: Misbehave | dict[str, Any]) -> Callable[[int, dict[str, Any]], Misbehave | dict[str, Any]]:
    """These for the first requests, then answers."""
    return lambda number, _: faults[number - 1] if number <= len(faults) else completion()


FAULTS = {
    "a reply that is no JSON": Misbehave(body="<html>proxy</html>"),
    "a reply that is no JSON (torn)": Misbehave(body=json.dumps(completion())[:-9]),
    "a reply without `choices`": Misbehave(body='{"object": "error"}'),
    "token ids that are no integers": completion(ids=["a"]),
    "another number of token ids": completion(counted=9),
    "HTTP 500: boom": Misbehave(500, '{"error": {"message": "boom"}}'),
    "HTTP 502: no message": Misbehave(502),
    "HTTP 404: gone": Misbehave(404, '{"error": "gone"}'),
    "the connection broke": Misbehave(drop=True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_tried_again(name: str) -> None:
    with ChatServer(first(FAULTS[name], FAULTS[name])) as server:
        assert ask([server.url]) == [YES]
        assert len(server.asked) == 3
        assert all(asked == server.asked[0] for asked in server.asked)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_is_given_up_with_its_reason(name: str) -> None:
    with ChatServer(lambda *_: FAULTS[name]) as server:
        (refused,) = ask([server.url])
        assert str(refused).startswith(name.removesuffix(" (torn)"))
        assert str(refused).endswith("(3 tries)")
        assert len(server.asked) == 3


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_is_wrong_is_not_tried_again(status: int) -> None:
    with ChatServer(lambda *_: Misbehave(status, '{"error": {"message": "prompt\\n too long"}}')) as server:
        (refused,) = ask([server.url])
        assert str(refused) == f"HTTP {status}: prompt too long"
        assert len(server.asked) == 1


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.5)
    pauses = [[module.pause(n) for _ in range(50)] for n in range(1, 9)]
    assert all(0.75 * 0.02 * 2**n <= p <= 1.25 * 0.02 * 2**n for n, row in enumerate(pauses[:4]) for p in row)
    assert max(pauses[-1]) <= 0.625
    assert len(set(pauses[0])) > 40


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_busy_server_gets_the_pause_that_it_asks_for_and_no_blame(status: int, form: str) -> None:
    """One try is allowed, and the pause holds for all requests to this server."""
    pause = "1" if form == "seconds" else email.utils.formatdate(time.time() + 2, usegmt=True)
    with ChatServer(first(Misbehave(status, "busy", {"retry-after": pause}))) as server:
        assert ask([server.url], count=3, each=1, tries=1) == [YES] * 3
        assert server.times[1] - server.times[0] >= 0.95
        assert len(server.asked) == 4


def test_while_one_server_is_busy_another_works() -> None:
    with ChatServer(lambda *_: Misbehave(429, "later", {"retry-after": "30"})) as busy, ChatServer(first()) as good:
        began = time.monotonic()
        assert ask([busy.url, good.url], count=20, each=2, tries=1) == [YES] * 20
        assert time.monotonic() - began < 10
        assert (len(busy.asked), len(good.asked)) == (2, 20)


def test_a_hang_ends_by_the_timeout_and_moves_on() -> None:
    with ChatServer(lambda *_: Misbehave(hang=True)) as stuck, ChatServer(first()) as good:
        assert ask([stuck.url, good.url], count=4, each=1, timeout=0.3) == [YES] * 4
        assert stuck.asked
    with ChatServer(lambda *_: Misbehave(hang=True)) as stuck:
        (refused,) = ask([stuck.url], timeout=0.2, tries=2)
        assert str(refused).startswith("no reply in time")


def test_requests_on_a_server_are_bounded_and_the_bound_is_used() -> None:
    def slow(_number: int, _body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.05)
        return completion()

    with ChatServer(slow) as one, ChatServer(slow) as two:
        assert ask([one.url, two.url], count=24, each=3) == [YES] * 24
        assert (one.most, two.most) == (3, 3)
        assert len(one.asked) + len(two.asked) == 24
        assert min(len(one.asked), len(two.asked)) >= 8


def test_the_key_is_sent() -> None:
    with ChatServer(first()) as server:
        ask([server.url])
        assert server.headers[0]["authorization"] == "Bearer secret"


def test_the_work_of_a_server_that_dies_moves_and_comes_back_when_it_does() -> None:
    """It dies with requests on it, and is started again on the same port; both lists together hold every request."""
    slow = threading.Event()

    def good(_number: int, _body: dict[str, Any]) -> dict[str, Any]:
        slow.wait(0.02)
        return completion()

    def dying(number: int, _body: dict[str, Any]) -> Misbehave | dict[str, Any]:
        if number == 4:
            threading.Thread(target=mortal.close).start()
            threading.Timer(0.3, lambda: reborn.append(ChatServer(good, port=mortal.port))).start()
        return good(number, _body) if number < 4 else Misbehave(drop=True)

    reborn: list[ChatServer] = []
    with ChatServer(good) as survivor, ChatServer(dying) as mortal:
        assert ask([survivor.url, mortal.url], count=150, each=3) == [YES] * 150
        assert len(reborn[0].asked) > 10
        assert reborn[0].most == 3  # after its first answer it is no suspect any more
        assert {b["n"] for s in (survivor, mortal, reborn[0]) for b in s.asked} == set(range(150))
        reborn[0].close()


def test_a_server_that_answers_garbage_soon_gets_little_work() -> None:
    with ChatServer(lambda *_: Misbehave(body="garbage")) as bad, ChatServer(first()) as good:
        assert ask([bad.url, good.url], count=200, each=2) == [YES] * 200
        assert 3 <= len(bad.asked) < 20


def test_a_server_that_comes_back_with_another_model_gets_no_work() -> None:
    def changing(number: int, _body: dict[str, Any]) -> Misbehave:
        other.models = ("something else",)
        return Misbehave(drop=True)

    with ChatServer(changing) as other, ChatServer(lambda *_: (time.sleep(0.01), completion())[1]) as good:
        assert ask([other.url, good.url], count=100, each=3) == [YES] * 100
        assert 3 <= len(other.asked) <= 6  # what ran on it at once, or was sent before the third fault


def test_when_all_are_gone_the_error_names_each() -> None:
    def die(server: ChatServer) -> Misbehave:
        threading.Thread(target=server.close).start()
        return Misbehave(drop=True)

    with ChatServer(lambda *_: die(one)) as one, ChatServer(lambda *_: die(two)) as two:
        with pytest.raises(ServersGone, match="no server has worked for 0 s") as found:
            ask([one.url, two.url], patience=0.4, tries=9)
        for server in (one, two):
            assert f"{server.url}/v1: cannot be reached" in str(found.value)


def test_overload_without_end_is_not_waited_for_forever() -> None:
    with ChatServer(lambda *_: OVERLOADED) as server, pytest.raises(ServersGone, match="HTTP 503: busy"):
        ask([server.url], patience=0.3)


# ---- the first meeting ----


def test_the_model_is_found_out() -> None:
    with ChatServer(first(), models=["org/model"]) as server:
        ask([server.url])
        assert server.asked[0]["model"] == "org/model"


def test_several_models_must_be_chosen_from_and_a_wrong_one_is_named() -> None:
    with ChatServer(first(), models=["tiny", "large"]) as server:
        with pytest.raises(ValueError, match="serves tiny, large: name one with --model"):
            ask([server.url])
        with pytest.raises(ValueError, match=r"serves tiny, large, not larg; did you mean large\?"):
            ask([server.url], model="larg")
        assert ask([server.url], model="large") == [YES]
        assert server.asked[-1]["model"] == "large"


def test_servers_of_different_models_are_refused() -> None:
    with ChatServer(first(), models=["a"]) as one, ChatServer(first(), models=["b"]) as two, pytest.raises(ValueError, match="serves b, not a"):
        ask([one.url, two.url])


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_named(status: int) -> None:
    with ChatServer(first(), models_status=status) as server, pytest.raises(ValueError, match=f"HTTP {status}.*DRAFTSMITH_API_KEY"):
        ask([server.url])


def test_a_server_without_a_list_of_models_needs_a_name() -> None:
    with ChatServer(first(), models_status=404) as server:
        with pytest.raises(ValueError, match="--model"):
            ask([server.url])
        assert ask([server.url], model="m") == [YES]


def test_an_absent_server_is_warned_about_and_all_absent_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with ChatServer(first()) as gone:
        pass
    with ChatServer(first()) as good:
        assert ask([gone.url, good.url], count=5) == [YES] * 5
        assert f"{gone.url}/v1: cannot be reached" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ServersGone, match=r"no server answers: .*cannot be reached"):
        ask([gone.url])


def test_addresses() -> None:
    assert {address(f"http://h:8000{end}") for end in ("", "/", "/v1", "/v1/")} == {"http://h:8000/v1"}
    for wrong in ("localhost:8000", "http://", "ftp://h", ""):
        with pytest.raises(ValueError, match="expected an address like"):
            address(wrong)
    with pytest.raises(ValueError, match="at least one"):
        ask([])
