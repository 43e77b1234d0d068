"""Streamed text equals the one-shot decode, whatever the tokens; stop strings cut alike wherever tokens end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from oasis_tp.server.detokenizer import Detokenizer, StopMatcher, TokenDecoder

WORDS = ["hello", " hello", "é", "😀", " 😀", "日本", "<", "stop", "\ufffd", "  "]


def byte_level() -> Tokenizer:
    """Every byte a token, words, and tokens that cut characters in the middle."""
    to_byte_chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    emoji = to_byte_chars.pre_tokenize_str("😀é日")[0][0]
    pieces = [to_byte_chars.pre_tokenize_str(word)[0][0] for word in WORDS]
    cuts = [emoji[start:stop] for start in range(len(emoji)) for stop in range(start + 1, len(emoji) + 1)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*alphabet, *pieces, *cuts]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<added>"), AddedToken("<ädd>")])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Llama 2's kind: byte fallback, and a decoder that drops the text's first space."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", *("▁" + word for word in WORDS), *WORDS]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    """A decoder that treats the first token itself differently."""
    tokens = ["<unk>", "▁", *("▁" + word for word in WORDS), *WORDS]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(dict.fromkeys(tokens))}, merges=[])
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "sentence_piece": sentence_piece(), "metaspace": metaspace()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_concatenate_to_the_one_shot_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 2), max_size=40))
    decoder = TokenDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in ids] + [decoder.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="é😀日a \u200d", max_size=20), st.data())
def test_a_character_cut_by_tokens_never_shows_as_a_replacement(text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    ids = [tokenizer.token_to_id(char) for char in (chars[0][0] if chars else "")]
    decoder = TokenDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text, "a complete character is not held back"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(b"\xf0\x9f\x98\x80\xc3\xa9\xe6\x97\xa5\xff a"), max_size=60))
def test_broken_and_whole_characters_mixed(data: list[int]) -> None:
    """Byte by byte, as the Unicode standard replaces: one U+FFFD per maximal broken part."""
    names = byte_names()
    decoder = TokenDecoder(TOKENIZERS["byte_level"])
    pieces = [decoder.push(TOKENIZERS["byte_level"].token_to_id(names[byte])) for byte in data]
    assert "".join(pieces) + decoder.finish() == bytes(data).decode(errors="replace")


def byte_names() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def test_the_window_stays_short_over_ordinary_text() -> None:
    for tokenizer in TOKENIZERS.values():
        decoder = TokenDecoder(tokenizer)
        for token_id in [tokenizer.token_to_id(word) for word in ("hello", "stop", "<")] * 9:
            decoder.push(token_id)
            assert len(decoder._window) < 4


def test_a_long_run_of_invalid_bytes_is_not_held_back_nor_re_read() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.token_to_id(pre_tokenizers.ByteLevel(use_regex=False).pre_tokenize_str("é")[0][0][-1])] * 3000
    decoder = TokenDecoder(tokenizer)
    text = "".join(decoder.push(token_id) for token_id in ids)
    assert len(text) == 2999
    assert len(decoder._window) < 10
    assert text + decoder.finish() == tokenizer.decode(ids)


def cut_at_first_complete(text: str, stop: list[str]) -> str:
    """The truth, one character at a time."""
    for end in range(1, len(text) + 1):
        starts = [end - len(word) for word in stop if text[:end].endswith(word)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_alike_wherever_pieces_end(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert cut_at_first_complete("".join(pieces), stop).startswith(shown), "a part of a stop string leaked"
    shown += matcher.finish()
    assert shown == cut_at_first_complete("".join(pieces), stop)


def test_detokenizer_stops_across_token_borders() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.token_to_id(token) for token in ("a", "<", "stop", "b")]
    detokenizer = Detokenizer(tokenizer, stop=("<stop",))
    assert [detokenizer.push(token_id) for token_id in ids[:2]] == ["a", ""]
    assert (detokenizer.push(ids[2]), detokenizer.stopped) == ("", True)
    assert detokenizer.push(ids[3]) + detokenizer.finish() == ""


def test_what_is_held_back_is_returned_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=("<stop",))
    assert detokenizer.push(tokenizer.token_to_id("<")) == ""
    assert (detokenizer.finish(), detokenizer.stopped) == ("<", False)
