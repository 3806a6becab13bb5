"Every message comes back from its bytes, and no bytes at all do more harm than a `MessageError`."
import msgspec
import numpy as np
from hypothesis import given, strategies as st

from minisgl_lit.core.request import FinishReason
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.outputs import EngineCoreOutputs, EngineCoreOutput
from minisgl_lit.distributed.kv_events import KVEvents
from minisgl_lit.loop.messages import (
    AbortMsg, ControlMsg, ControlReply, FailMsg, KVEventsMsg, MessageError, ReadyMsg, RefusedMsg, StopMsg,
    UserMsg, decode, encode)

text, whole = st.text(max_size=20), st.integers(0, 2**63 - 1)
real = st.floats(allow_nan=False, allow_infinity=False)
params = st.builds(SamplingParams, temperature=st.none() | st.floats(0, 10),
                   top_p=st.none() | st.floats(.1, 1),
                   top_k=st.none() | st.integers(-1, 100), max_tokens=st.none() | whole,
                   seed=st.none() | whole, stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
                   stop_token_ids=st.lists(whole, max_size=3), ignore_eos=st.booleans(),
                   skip_special_tokens=st.booleans(), no_stop_trim=st.booleans())
replies = st.builds(EngineCoreOutput, rid=text, token_ids=st.lists(whole, max_size=4),
                    finish_reason=st.none() | st.sampled_from(FinishReason), matched=st.none() | text | whole,
                    error=st.none() | text, prompt_tokens=whole, cached_tokens=whole,
                    times=st.none() | st.tuples(real, real, real))
data = st.recursive(st.none() | st.booleans() | whole | real | text, lambda o: st.lists(o, max_size=3) |
                    st.dictionaries(text, o, max_size=3), max_leaves=8)
plain_messages = st.one_of(
    st.builds(AbortMsg, text), st.builds(ControlMsg, whole, text, text), st.just(StopMsg()),
    st.builds(ReadyMsg, text, whole, whole), st.builds(FailMsg, text, st.booleans()),
    st.builds(RefusedMsg, text, text, text, st.booleans()),
    st.builds(ControlReply, whole, st.dictionaries(text, data, max_size=3), st.none() | text),
    st.lists(st.tuples(text, whole), max_size=4).flatmap(
        lambda o: st.builds(EngineCoreOutputs, st.just([a for a, _ in o]), st.just([b for _, b in o]),
                            st.lists(replies, max_size=3))))
user_messages = st.builds(UserMsg, text,
                          st.lists(whole, max_size=9).map(lambda o: np.array(o, dtype=np.int64)), params)
hashes = st.lists(st.integers(-2**63, 2**63 - 1), max_size=5).map(lambda o: np.array(o, dtype=np.int64))
event_messages = st.builds(KVEventsMsg, st.builds(KVEvents, whole, hashes, hashes, st.booleans()))


@given(plain_messages)
def test_comes_back_equal(message):
    again = decode(encode(message))
    assert again == message and type(again) is type(message)


@given(user_messages)
def test_prompt_comes_back_equal(message):
    again = decode(encode(message))
    assert (again.rid, again.params) == (message.rid, message.params)
    assert again.input_ids.dtype == np.int64 and np.array_equal(again.input_ids, message.input_ids)


@given(event_messages)
def test_events_come_back_equal(message):
    was, now = message.events, decode(encode(message)).events
    assert (now.number, now.snapshot) == (was.number, was.snapshot)
    assert np.array_equal(now.stored, was.stored) and np.array_equal(now.removed, was.removed)


@given(st.binary(max_size=60))
def test_any_bytes(junk):
    try: decode(junk)
    except MessageError: pass


@given(st.one_of(plain_messages, user_messages, event_messages), st.data())
def test_changed_messages(message, d):
    """A field missing, one too many, one of another kind, another name, a byte changed: refused, or again a
    message."""
    fields = msgspec.msgpack.decode(encode(message))
    name = d.draw(st.sampled_from(sorted(fields)))
    without = {k: v for k, v in fields.items() if k != name}
    for wrong in (without, fields | {'more': d.draw(data)}, fields | {name: d.draw(data)},
                  fields | {'type': d.draw(data)}):
        try: again = decode(msgspec.msgpack.encode(wrong))
        except MessageError: continue
        assert 'more' not in wrong and type(again).__name__ == wrong['type']
    raw = bytearray(encode(message))
    raw[d.draw(st.integers(0, len(raw) - 1))] ^= d.draw(st.integers(1, 255))
    try: decode(bytes(raw))
    except MessageError: pass
