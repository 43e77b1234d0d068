"""DraftPace: how many drafts of a request are worth verifying, by how earlier ones fared. Pure Python."""


class DraftPace:
    """Draft length of one request, the same rule for every drafter.

    It grows by one when a whole draft was accepted, falls to one more than what was accepted when not, and after
    drafts of which nothing was accepted pauses for ever longer (1, 2, 4 … up to `MAX_PAUSE` steps), so that a drafter
    that never hits costs next to nothing.
    """

    MAX_PAUSE = 32

    def __init__(self, num_tokens: int) -> None:
        assert num_tokens >= 1
        self.num_tokens = num_tokens
        self._length = num_tokens
        self._pause = 0
        self._waiting = 0

    @property
    def length(self) -> int:
        """Drafts to verify in the next step; 0 while it pauses."""
        return 0 if self._waiting else self._length

    def observe(self, num_verified: int, num_accepted: int) -> None:
        """A step went by in which so many drafts were verified and accepted; none verified shortens a pause."""
        if num_verified == 0:
            self._waiting = max(0, self._waiting - 1)
            return
        if num_accepted == 0:
            self._pause = min(self.MAX_PAUSE, max(1, 2 * self._pause))
            self._waiting = self._pause
            self._length = 1
            return
        self._pause = 0
        # A draft that was right to its end may have been cut short by its limit: it says nothing against longer ones.
        longest = max(self._length, num_accepted + 1) if num_accepted == num_verified else num_accepted + 1
        self._length = min(self.num_tokens, longest)
