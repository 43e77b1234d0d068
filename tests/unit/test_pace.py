from oasis_tp.draft.pace import DraftPace


def test_length_follows_acceptance() -> None:
    pace = DraftPace(4)
    assert pace.length == 4
    pace.observe(4, 1)
    assert pace.length == 2
    pace.observe(2, 2)
    assert pace.length == 3
    pace.observe(3, 2)
    assert pace.length == 3
    pace.observe(1, 1)
    assert pace.length == 3, "a draft cut short by its limit says nothing against longer ones"


def test_misses_pause_ever_longer() -> None:
    pace = DraftPace(4)
    paused = []
    for _ in range(8):
        pace.observe(1, 0)
        steps = 0
        while pace.length == 0:
            pace.observe(0, 0)
            steps += 1
        paused.append(steps)
    assert paused == [1, 2, 4, 8, 16, 32, 32, 32]
    assert pace.length == 1
    pace.observe(1, 1)
    assert pace.length == 2
    pace.observe(2, 0)
    pace.observe(0, 0)
    assert pace.length == 1, "a hit ends the doubling"
