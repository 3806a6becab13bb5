"""Tokenizer files wherever they may lie, and text in pieces for tokens that no model should write."""
import asyncio
import json

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import assume, example, given, settings, strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from minisgl_lit.core.request import FinishReason, PendingReq
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.outputs import EngineCoreOutput
from minisgl_lit.server.sse import OutputQueue
from minisgl_lit.text.tokenizer import (
    OutputCollector, Tokenizer, TextStopChecks)
from minisgl_lit.core.tokenizer import TextDecoder

BEGIN, END = 256, 257   # after one token for each byte


def byte_level():
    "One token for each byte, in the order of bytes, and two special ones."
    tok = tokenizers.Tokenizer(models.BPE({o: i for i, o in enumerate(byte_letters())}, merges=[]))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.add_special_tokens(["<s>", "</s>"])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    return tok


def byte_letters():
    """The letter by which byte-level vocabularies write each byte: itself if it can be printed, else one from
    256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printed else next(others)) for b in range(256)]


def byte_fallback():
    "Words with a mark for the space before them, and all else in tokens like <0xF0>."
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "b": 259, "▁▁": 260}
    tok = tokenizers.Tokenizer(models.BPE(vocab, merges=[("▁", "a"), ("▁", "▁")], byte_fallback=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(" ", 1, 0)])
    return tok


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    "Makes a folder with a tokenizer and other files, given as text or as something for JSON."
    def make(tok, **files):
        folder = tmp_path_factory.mktemp("checkpoint")
        if tok: tok.save(str(folder/"tokenizer.json"))
        for name, content in files.items():
            (folder/name.replace("__", ".")).write_text(content if isinstance(content, str)
                else json.dumps(content), encoding="utf-8")
        return folder
    return make


@pytest.fixture(scope="session")
def plain(checkpoint): return Tokenizer(checkpoint(byte_level()))


@pytest.fixture(scope="session")
def spaced(checkpoint): return Tokenizer(checkpoint(byte_fallback()))


# -- files ---------------------------------------------------------------------------------------

def test_where_the_template_stands(checkpoint):
    named = [dict(name="tool_use", template="T"), dict(name="default", template="D")]
    for files, source in [
        (dict(tokenizer_config__json={"chat_template": "C"}), "C"),
        (dict(tokenizer_config__json={"chat_template": named}), "D"),
        (dict(chat_template__jinja="J"), "J"),
        (dict(chat_template__jinja="J", tokenizer_config__json={"chat_template": "C"}), "J")]:
        assert Tokenizer(checkpoint(byte_level(), **files)).chat_template.source == source
    only = Tokenizer(checkpoint(byte_level(), tokenizer_config__json={"chat_template": named[:1]}))
    assert only.chat_template is None and only.tool_template.source == "T"
    both = Tokenizer(checkpoint(byte_level(), tokenizer_config__json={"chat_template": named}))
    assert both.tool_template.source == "T" and both.chat_template.source == "D"


def test_names_of_special_tokens(checkpoint):
    for content in ("<s>", {"content": "<s>"}):
        for file in ("special_tokens_map__json", "tokenizer_config__json"):
            t = Tokenizer(checkpoint(byte_level(),
                **{file: {"bos_token": content, "unk_token": None, "add_bos_token": True}}))
            assert t.special == {"bos_token": "<s>"}
            assert t.encode("<s>a").tolist() == t.encode("a").tolist() == [BEGIN, ord("a")]
    no_name = Tokenizer(checkpoint(byte_level()))
    assert no_name.encode("<s>a").tolist() == [BEGIN, BEGIN, ord("a")]   # nobody says which token begins


def test_special_because_the_config_says_so(checkpoint):
    "As `transformers` does; a special token that does not exist is none."
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "x", "pad_token": "<pad>"}
    folder = checkpoint(byte_level(), tokenizer_config__json=named)
    from transformers import AutoTokenizer
    for t in (Tokenizer(folder), AutoTokenizer.from_pretrained(folder)):
        assert t.decode(t.encode("axb"), skip_special_tokens=True) == "ab"


def test_limits_in_the_file_do_not_count(checkpoint):
    tok = byte_level()
    tok.enable_truncation(4)
    tok.enable_padding(length=8)
    assert len(Tokenizer(checkpoint(tok)).encode("abcdef")) == 7


def test_older_files(checkpoint):
    made = json.loads(byte_level().to_str())["model"]
    folder = checkpoint(None, vocab__json=made["vocab"], merges__txt="#version: 0.2\n",
                        tokenizer_config__json={"tokenizer_class": "GPT2Tokenizer"})
    assert Tokenizer(folder).encode("hé").tolist() == list("hé".encode())


def test_template_that_is_none(checkpoint):
    t = Tokenizer(checkpoint(byte_level(), chat_template__jinja="{% if %}"))
    with pytest.raises(ValueError, match="chat template"): t.chat([dict(role="user", content="hi")])


# -- pieces --------------------------------------------------------------------------------------

def in_pieces(tokenizer, ids, sizes, skip=True):
    "The text, decoded in packs of these sizes, again and again"
    d, out, at = TextDecoder(tokenizer, skip), [], 0
    while at < len(ids):
        out.append(d.push(ids[at:at + sizes[len(out) % len(sizes)]]))
        at += sizes[(len(out) - 1) % len(sizes)]
        assert len(d._ids) <= 8 + max(sizes)
    return "".join(out + [d.finish()])


texts = st.text(st.sampled_from("ab  é你👋\u0301\ufffd\U0010ffff"), max_size=12)
halves = st.tuples(st.sampled_from("é你👋\U0010ffff"), st.integers(0, 4)).map(lambda o: o[0].encode()[:o[1]])
odd = st.sampled_from([0x80, 0xbf, 0xc0, 0xc2, 0xe0, 0xa0, 0xed, 0xf0, 0x90, 0xf4, 0x8f,
                       0xff]).map(lambda b: bytes([b]))
junk = st.lists(st.one_of(texts.map(str.encode), halves, odd, st.binary(max_size=6), st.just(b"\x80" * 9)),
                max_size=12).map(b"".join)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(junk, sizes)
def test_any_bytes(plain, junk, sizes):
    ids = list(junk)
    assert in_pieces(plain, ids, sizes) == plain.decode(ids) == junk.decode(errors="replace")


@given(st.lists(st.integers(0, 300), max_size=30), sizes, st.booleans())
def test_any_numbers(plain, ids, sizes, skip):
    assert in_pieces(plain, ids, sizes, skip) == plain.decode(ids, skip)


@given(texts, sizes)
def test_any_text_with_fallback(spaced, text, sizes):
    assume('\ufffd' not in text)    # its bytes, one by one, cannot be told from broken ones
    ids = spaced.encode(text).tolist()
    assert in_pieces(spaced, ids, sizes) == spaced.decode(ids)


@given(texts)
def test_no_broken_character(plain, text):
    d = TextDecoder(plain)
    pieces = [d.push([i]) for i in text.encode()]
    assert "".join(pieces).count("\ufffd") <= text.count("\ufffd") and "".join(pieces) + d.finish() == text


# -- two readers of one answer -------------------------------------------------------------------
patterns = st.sampled_from([None, "a+b", r"\W\w", "[^a]b", "(?<=a)é", "b(?=a)", "a$", ". .", "(?i)AB|é{2}"])


@settings(max_examples=300)
@given(texts, st.lists(st.text(st.sampled_from("ab é你"), min_size=1, max_size=3), max_size=3), patterns,
       sizes, st.booleans())
@example("xab", ["ab"], None, [6, 2], False)   # read when the stop has begun
def test_scheduler_and_reader_agree(plain, text, stop, pattern, sizes, keep):
    """The stop check ends the answer at a token, however late it searches; a reader shows the right text,
    however late it reads its outputs."""
    ids, params = list(text.encode()), SamplingParams(stop=stop, stop_regex=pattern, no_stop_trim=keep)
    checks, n, matched = TextStopChecks(plain), 0, None
    told, reader, texts = (checks.make(PendingReq("r", np.array([1]), params, max_len=99)),
                           OutputCollector(plain, params), [])
    queue = OutputQueue()
    for k, i in enumerate([*ids, 0]):   # the last is an end token
        told.push(i, None, (FinishReason.STOP, 0) if k == len(ids) else None)
        if sizes[k % len(sizes)] % 2 and k < len(ids): continue   # put off
        checks.search([told])
        while told.checker.behind: checks.search([told])   # a busy machine puts it off
        if not (new := told.take()): continue
        n, (reason, matched) = n + len(new.token_ids), new.end or (None, None)
        if len(new.token_ids) == 1 and not reason and new.shown is None: queue.put_token("r", *new.token_ids)
        else: queue.put(EngineCoreOutput("r", new.token_ids, reason, matched, shown=new.shown))
        if reason or sizes[k % len(sizes)] % 3: texts.append(reader.add(*asyncio.run(queue.get())).text)
        if reason: break
    assert reader.output.text == "".join(texts) and reader.output.token_ids == [*ids, 0][:n]
    text_shown, found = stops_plainly(text, stop, pattern, keep)
    assert (reader.output.text == text_shown + "\0"*(keep and found is None)
            and (None if matched == 0 else matched) == found)
    if found is not None:
        assert (len(bytes(ids[:n]).decode(errors="replace").encode())
                and n == next(k for k in range(1, len(ids) + 1)
                              if stops_plainly(bytes(ids[:k]).decode(errors="ignore"), stop, pattern, keep)[1]
                              is not None))


def stops_plainly(text, stop, pattern, keep):
    "Try every end in turn: the text that is shown, and the stop"
    sources = [regex.escape(s) for s in stop] + [pattern]*(pattern is not None)
    for end in range(1, len(text) + 1):
        found = [m.span() for s in sources if (m := regex.search(s, text[:end]))]
        if found:
            begin, after = min(found)
            return text[:after if keep else begin], text[begin:after]
    return text, None
