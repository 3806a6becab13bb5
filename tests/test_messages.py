"Every message comes back from its bytes, and no bytes at all do more harm than a `MessageError`."
import msgpack
import numpy as np
from hypothesis import given, strategies as st

from minisgl_lit.core import FinishReason, SamplingParams
from minisgl_lit.news import News, Reply
from minisgl_lit.serving.messages import (AbortMsg, ControlMsg, ControlReply, FailMsg, MessageError, ReadyMsg,
                                          RefusedMsg, StopMsg, UserMsg, decode, encode)

text, whole = st.text(max_size=20), st.integers(0, 2**63 - 1)
real = st.floats(allow_nan=False, allow_infinity=False)
params = st.builds(SamplingParams, temperature=st.none() | st.floats(0, 10), top_p=st.none() | st.floats(.1, 1),
                   top_k=st.none() | st.integers(-1, 100), max_tokens=st.none() | whole, seed=st.none() | whole,
                   stop=st.lists(st.text(min_size=1, max_size=5), max_size=3), stop_token_ids=st.lists(whole, max_size=3),
                   ignore_eos=st.booleans(), skip_special_tokens=st.booleans(), no_stop_trim=st.booleans())
replies = st.builds(Reply, rid=text, token_ids=st.lists(whole, max_size=4),
                    finish_reason=st.none() | st.sampled_from(FinishReason), matched=st.none() | text | whole,
                    error=st.none() | text, prompt_tokens=whole, cached_tokens=whole,
                    times=st.none() | st.tuples(real, real, real))
data = st.recursive(st.none() | st.booleans() | whole | real | text, lambda o: st.lists(o, max_size=3) |
                    st.dictionaries(text, o, max_size=3), max_leaves=8)
plain_messages = st.one_of(
    st.builds(AbortMsg, text), st.builds(ControlMsg, whole, text, text), st.just(StopMsg()), st.builds(ReadyMsg, text, whole, whole),
    st.builds(FailMsg, text, st.booleans()), st.builds(RefusedMsg, text, text, text, st.booleans()),
    st.builds(ControlReply, whole, st.dictionaries(text, data, max_size=3), st.none() | text),
    st.lists(st.tuples(text, whole), max_size=4).flatmap(
        lambda o: st.builds(News, st.just([a for a, _ in o]), st.just([b for _, b in o]), st.lists(replies, max_size=3))))
user_messages = st.builds(UserMsg, text, st.lists(whole, max_size=9).map(lambda o: np.array(o, dtype=np.int64)), params)


@given(plain_messages)
def test_comes_back_equal(message):
    again = decode(encode(message))
    assert again == message and type(again) is type(message)


@given(user_messages)
def test_prompt_comes_back_equal(message):
    again = decode(encode(message))
    assert (again.rid, again.params) == (message.rid, message.params)
    assert again.input_ids.dtype == np.int64 and np.array_equal(again.input_ids, message.input_ids)


@given(st.binary(max_size=60))
def test_any_bytes(junk):
    try: decode(junk)
    except MessageError: pass


@given(st.one_of(plain_messages, user_messages), st.data())
def test_changed_messages(message, d):
    "A field missing, one too many, one of another kind, a byte changed: refused, or again a message."
    name, *values = msgpack.unpackb(encode(message), strict_map_key=False)
    i = d.draw(st.integers(0, len(values)))
    for wrong in ([name, *values[:-1]] if values else [name, None], [name, *values, d.draw(data)],
                  [name, *values[:i], d.draw(data), *values[i + 1:]], [d.draw(data), *values]):
        try: again = decode(msgpack.packb(wrong))
        except MessageError: continue
        assert len(wrong) == len(values) + 1 and type(again).__name__ == wrong[0]
    raw = bytearray(encode(message))
    raw[d.draw(st.integers(0, len(raw) - 1))] ^= d.draw(st.integers(1, 255))
    try: decode(bytes(raw))
    except MessageError: pass
