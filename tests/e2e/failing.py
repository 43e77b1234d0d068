"""`oasis_tp.serve` whose model falls over on the rank of FAIL_RANK, a few steps into a request."""

import os
import sys
from typing import Any

from oasis_tp import serve
from oasis_tp.engine.model_runner import ModelRunner

STEPS = 5


def fail_later() -> None:
    run, steps = ModelRunner.run, [0]

    def failing(self: ModelRunner, *arguments: Any) -> Any:
        steps[0] += 1
        if steps[0] > STEPS and os.environ.get("FAIL_RANK") == os.environ["RANK"]:
            raise RuntimeError("a kernel fell over")
        return run(self, *arguments)

    ModelRunner.run = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    fail_later()
    sys.exit(serve.main())
