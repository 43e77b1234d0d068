"""Text from a stream of token ids, exact to the character, with stop strings that never leak."""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenDecoder:
    """Incremental `decode(ids, skip_special_tokens=True)`.

    For any ids, the pieces from `push` and `finish` concatenate to what decoding all ids at once gives. Text whose
    bytes may still be completed by a later token is held back; U+FFFD appears only where the bytes are invalid.

    A short window of the last tokens is decoded again for every token. Its oldest token is context only, so that
    decoders that treat the first token of a text differently (dropping a leading space) do not do it mid-text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._skipped = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that were returned before

    def push(self, token_id: int) -> str:
        """Text that has become certain with this token; often empty."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        if BYTE_TOKEN.fullmatch(token):
            # One invalid byte turns its whole run of byte tokens into U+FFFD, so nothing of a run is certain.
            return ""
        text = self._decode(self._window)
        open_end = text.endswith(REPLACEMENT)
        end = len(text) - open_end
        piece = text[self._sent : end]
        self._sent = end
        if not open_end and piece:
            self._restart(keep=1, open_end=0)
        elif open_end and len(self._window) > 8:
            # A character has at most 4 bytes: earlier tokens cannot change what is still open.
            self._restart(keep=4, open_end=1)
        return piece

    def finish(self) -> str:
        """What was held back, when no token will follow."""
        text = self._decode(self._window)
        piece = text[self._sent :]
        self._sent = len(text)
        return piece

    def _restart(self, keep: int, open_end: int) -> None:
        self._window = self._window[-keep:]
        self._sent = len(self._decode(self._window)) - open_end

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class StopMatcher:
    """Cuts a text that arrives in pieces at the stop string that is complete first.

    The result does not depend on how the text is cut into pieces. The end of the text that may be the start of a
    stop string is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "an empty stop string"
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Text that is certain to be before any stop string; empty once `stopped`."""
        if self.stopped:
            return ""
        text = self._held + piece
        starts = [(text.find(stop), stop) for stop in self._stop]
        found = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        hold = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """What was held back, when no text will follow."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """One output's text: `TokenDecoder` followed by `StopMatcher`.

    Args:
        tokenizer: the raw `tokenizers` object.
        stop: strings that end the output; neither they nor what follows appears in the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = TokenDecoder(tokenizer)
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    def push(self, token_id: int) -> str:
        """Text that this token makes certain. Leave out the token that ended the output (end of text, stop id)."""
        return self._matcher.push(self._decoder.push(token_id))

    def finish(self) -> str:
        """The rest of the text, when no token will follow; may still find a stop string."""
        return self._matcher.push(self._decoder.finish()) + self._matcher.finish()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
