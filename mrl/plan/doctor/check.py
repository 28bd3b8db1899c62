"""What one look at the host says."""

from dataclasses import asdict, dataclass

OK, WARNING, FAILURE = "ok", "warning", "failure"


@dataclass(frozen=True)
class Check:
    """One finding. `cure` says what to do about it and is empty when all is well."""

    name: str
    status: str
    found: str
    cure: str = ""

    def to_json(self) -> dict[str, str]:
        """name, status, found, cure."""
        return asdict(self)


def ok(name: str, found: str) -> Check:
    return Check(name, OK, found)


def warning(name: str, found: str, cure: str) -> Check:
    return Check(name, WARNING, found, cure)


def failure(name: str, found: str, cure: str) -> Check:
    return Check(name, FAILURE, found, cure)
