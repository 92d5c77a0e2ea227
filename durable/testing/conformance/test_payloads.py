"""Payloads (rules 22, 23, 70, 71): what the codec let through comes back as it went in, whatever the store makes of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from durable.codec.plain import write
from durable.errors import PayloadTooLarge
from durable.model import ALL, Completed, Failed, HandedBack, RecordKind, Suspended
from durable.settings import HOUR

from .scenario import Scene, failure, rule, schedule

VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "zero": 0,
    "empty text": "",
    "empty list": [],
    "empty object": {},
    "2**53+1": 2**53 + 1,
    "2**63": 2**63,
    "-2**63-1": -(2**63) - 1,
    "10**400": 10**400,
    "smallest float": 5e-324,
    "largest float": 1.7976931348623157e308,
    "minus zero": -0.0,
    "a tenth": 0.1,
    "text with quotes": "'\"\\; DROP TABLE durable_run; --",
    "accents": "e\u0301 \u00e9 ß ﬁ",
    "other scripts": "ключ 鍵 مفتاح 🗝️",
    "beyond the plane": "\U0001f600" * 3,
    "control characters": "\t\n\r\x01\x1f\x7f\x85\u2028",
    "right to left": "\u202eabc",
    "long text": "x" * 100_000,
    "keys with dots and dollars": {"a.b": 1, "$set": 2, "$where": 3, "": 4, "__proto__": 5},
    "unordered keys": {"b": 1, "a": 2},
    "nested": [[[[[[[[[[1]]]]]]]]]],
    "wide": list(range(2000)),
    "mixed": {"a": [1, 2.5, "x", None, True, {"b": []}], "é": "ü"},
    "looks like a number": "1e5",
    "looks like json": '{"a": 1}',
}

every_value = pytest.mark.parametrize("value", VALUES.values(), ids=[name.replace(" ", "_") for name in VALUES])


def same(stored: str | None, value: Any) -> bool:
    """Equal in value and in type, all the way down (the order of keys is not promised)."""
    assert stored is not None
    return bool(exact(json.loads(stored)) == exact(value))


def exact(value: Any) -> Any:
    """A form in which 1, 1.0, True and "1" differ, and so do 0.0 and -0.0."""
    if isinstance(value, dict):
        fields: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {key: exact(inner) for key, inner in fields.items()}
    if isinstance(value, list):
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return [exact(inner) for inner in items]
    return type(value).__name__, repr(value)


@rule(70, 71)
@every_value
async def test_an_input_comes_back_as_it_went_in(scene: Scene, value: Any) -> None:
    held = await scene.take(input=write(value))
    assert same(held.run.input, value)
    assert same((await scene.get(held.run.run_id)).input, value)


@rule(70, 71)
@every_value
async def test_an_output_and_a_record_come_back_as_they_went_in(scene: Scene, value: Any) -> None:
    held = await scene.take()
    answer = await scene.append(held, "a", result=write({"value": value}), progress=write(value))
    assert answer.record is not None
    assert same(answer.record.result, {"value": value})
    (record,) = await scene.history(held.run.run_id)
    assert same(record.result, {"value": value})
    assert same((await scene.get(held.run.run_id)).progress, value)
    await scene.settle(held, Completed(output=write(value)))
    assert same((await scene.get(held.run.run_id)).output, value)


@rule(70, 71)
@every_value
async def test_a_signal_comes_back_as_it_went_in(scene: Scene, value: Any) -> None:
    held = await scene.take()
    await scene.send(held.run.run_id, payload=write(value))
    (signal,) = (await scene.inbox(held)).signals
    assert same(signal.payload, value)


@rule(70)
@pytest.mark.parametrize("text", ["é", "\\u00e9", "a\tb", "🗝️"])
async def test_unescaped_and_escaped_text_are_the_same_value(scene: Scene, text: str) -> None:
    for encoded in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
        run = await scene.start(input=encoded)
        assert json.loads(run.input) == text


@rule(70)
async def test_other_payloads_come_back_too(scene: Scene) -> None:
    value = VALUES["mixed"]
    text = json.dumps(value)
    row = await scene.store.put_schedule(schedule(input=text), scope=None)
    assert same(row.input, value)
    held = await scene.take(options=text)
    assert same(held.run.options, value)
    await scene.settle(held, Suspended(until=scene.store.clock() + HOUR, waiting_for=text, wake_seq=0))
    assert same((await scene.get(held.run.run_id)).waiting_for, value)
    other = await scene.take()
    await scene.settle(other, Failed(failure=failure("broke", detail=text)))
    assert same((await scene.get(other.run.run_id)).error_detail, value)
    assert (await scene.store.schedules(scope=None))[0] == row


@rule(23)
@pytest.mark.parametrize("message", ["", 'it\'s 100% "broken"', "多字节 🗝️", "line\nline\ttab", "x" * 20_000])
async def test_an_error_message_is_text(scene: Scene, message: str) -> None:
    held = await scene.take()
    await scene.settle(held, Failed(failure=failure(message)))
    run = await scene.get(held.run.run_id)
    assert run.error == message


@rule(34, 37)
@pytest.mark.parametrize("text", ["'; --", "ключ", "a b", "🗝️", "%s %d {}", "e\u0301"])
async def test_names_tags_and_ids_are_data(scene: Scene, text: str) -> None:
    run = await scene.start(
        name=text,
        queue=text,
        tags={text: text},
        sequence_key=text,
        concurrency_key=text,
        version=text,
        fingerprint=text,
    )
    claimed = await scene.claim(queues={text: 1}, functions=[(text, text)])
    assert [one.run.run_id for one in claimed] == [run.run_id]
    assert (claimed[0].run.name, claimed[0].run.queue, dict(claimed[0].run.tags)) == (text, text, {text: text})
    answer = await scene.append(claimed[0], text, digest=text)
    assert answer.record is not None
    assert (answer.record.step_id, answer.record.digest) == (text, text)
    await scene.send(run.run_id, text, dedup_id=text)
    assert [signal.name for signal in (await scene.inbox(claimed[0])).signals] == [text]
    assert [found.run_id for found in await scene.runs(names=[text], queues=[text], tags={text: text})] == [run.run_id]


@rule(70)
@pytest.mark.parametrize("priority", [-(2**31), -1, 0, 1, 2**31 - 1])
async def test_every_priority_of_32_bits_is_kept(scene: Scene, priority: int) -> None:
    assert (await scene.start(priority=priority)).priority == priority


@rule(19)
@pytest.mark.parametrize("seed", [b"", b"\x00\xff" * 8, bytes(range(256))])
async def test_a_seed_is_bytes(scene: Scene, seed: bytes) -> None:
    held = await scene.take(seed=seed)
    assert held.run.seed == seed


@rule(26, 70)
async def test_large_payloads_side_by_side_do_not_harm_each_other(scene: Scene) -> None:
    big = json.dumps("x" * 1_000_000)
    held = [await scene.take() for _ in range(4)]
    records = [(one.lease, await scene.record(one.run.run_id, "a", result=big)) for one in held]
    assert [answer.state for answer in await scene.store.append(records)] == ["appended"] * 4
    for one in held:
        assert (await scene.history(one.run.run_id))[0].result == big


@rule(32, 70)
async def test_a_value_of_the_largest_size_can_be_sent_and_recorded_and_one_beyond_is_refused(scene: Scene) -> None:
    most = scene.store.settings.max_payload
    largest = json.dumps("x" * (most - 2))
    held = await scene.take()
    await scene.send(held.run.run_id, "word", payload=largest)
    envelope = f'{{"v":{largest}}}'
    await scene.append(held, "signal:word", kind=RecordKind.SIGNAL, result=envelope)
    assert (await scene.history(held.run.run_id))[0].result == envelope
    with pytest.raises(PayloadTooLarge):
        await scene.send(held.run.run_id, "word", payload=largest + " ")


@rule(25, 71)
async def test_what_can_not_be_read_any_more_is_handed_back_or_failed_by_its_kind(scene: Scene) -> None:
    """The store keeps the reason that the holder gives; the journal stays as it is."""
    held = await scene.take()
    await scene.append(held, "a", kind=RecordKind.STEP)
    await scene.settle(held, HandedBack(failure=failure("no such type", kind="payload")))
    run = await scene.get(held.run.run_id)
    assert (run.error_kind, run.error) == ("payload", "no such type")
    again = await scene.take_again(held.run.run_id)
    await scene.settle(again, Failed(failure=failure("no such type", kind="payload")))
    assert (await scene.get(held.run.run_id)).error_kind == "payload"
    assert len(await scene.store.history(held.run.run_id, scope=ALL)) == 1
