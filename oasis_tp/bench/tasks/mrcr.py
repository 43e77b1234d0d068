"""A task like OpenAI's MRCR: a conversation in which the same thing is asked for several times, and one answer of it.

The conversation's answers are passages of the haystack's prose, so that none can be known before.
"""

import random
import string

from oasis_tp.bench.tasks.draft import Ask, Draft, vocabulary
from oasis_tp.bench.tasks.fit import largest_fit

NUM_ASKED_ALIKE = 4
MAX_PASSAGE_CHARS = 400
FORMS = ("note", "letter", "report", "story", "riddle", "speech", "review", "summary")
_NTH = ("first", "second", "third", "fourth")


def mrcr(ask: Ask) -> Draft:
    """Four requests alike among others; give back the answer to one of them, after a code that it must begin with."""
    rng = ask.rng
    passages = _passages(ask.haystack)
    form, topic = rng.choice(FORMS), rng.choice(vocabulary())
    texts = rng.sample(passages, NUM_ASKED_ALIKE)
    nth = rng.randrange(NUM_ASKED_ALIKE)
    code = "".join(rng.choices(string.ascii_letters + string.digits, k=10))
    depths = sorted(rng.random() for _ in range(NUM_ASKED_ALIKE))
    alike = [_turn(form, topic, text) for text in texts]
    stream = random.Random(rng.getrandbits(64))
    drawn: list[str] = []

    def prompt(size: int) -> str:
        while len(drawn) < size:
            other = stream.choice(FORMS), stream.choice(vocabulary())
            if other != (form, topic):
                drawn.append(_turn(*other, stream.choice(passages)))
        turns = drawn[:size]
        for depth, turn in reversed(list(zip(depths, alike, strict=True))):
            turns.insert(round(depth * size), turn)
        return "".join(turns) + (
            f"User: Write {code}, and directly after it, word for word, the {_NTH[nth]} {form} about {topic} that you "
            "wrote above. Write nothing else.\nAssistant:"
        )

    size, num_tokens = largest_fit(ask.tokenizer, ask.num_tokens, prompt, 0)
    return Draft(
        input=prompt(size).removesuffix("\nAssistant:"),
        outputs=(code + texts[nth],),
        answer_prefix="\nAssistant:",
        num_prompt_tokens=num_tokens,
        depth=depths[nth],
        answer_start=code,
    )


def _passages(sentences: tuple[str, ...]) -> list[str]:
    """The prose in passages of whole sentences on one line each, of 100 to MAX_PASSAGE_CHARS characters.

    Raises:
        ValueError: the prose has too few.
    """
    found, open_text = [], ""
    for sentence in sentences:
        words = " ".join(sentence.split())
        if len(open_text) + 1 + len(words) > MAX_PASSAGE_CHARS:
            found += [open_text] if len(open_text) >= 100 else []
            open_text = ""
        if len(words) <= MAX_PASSAGE_CHARS:
            open_text = f"{open_text} {words}".strip()
    found += [open_text] if len(open_text) >= 100 else []
    if len(found) < 2 * NUM_ASKED_ALIKE:
        raise ValueError(
            f"--haystack: mrcr needs {2 * NUM_ASKED_ALIKE} passages of whole sentences, and it has {len(found)}"
        )
    return found


def _turn(form: str, topic: str, text: str) -> str:
    return f"User: Write a {form} about {topic}.\nAssistant: {text}\n"
