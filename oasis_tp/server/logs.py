"""Log lines: text for people, JSON for collectors; the rank in each."""

import json
import logging
import time


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, rank, logger, message, and exception where there is one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "rank": self._rank,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logs(level: str, form: str, rank: int) -> None:
    """Send log lines of at least `level` to stderr. `form`: text or json."""
    handler = logging.StreamHandler()
    text = f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter(rank) if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])
