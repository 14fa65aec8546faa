"""The one style of this package's errors: what was given, the rule it breaks, what to do. The texts: refusals.ini."""

from configparser import ConfigParser
from functools import cache
from importlib.resources import files


class BadBatchError(ValueError):
    """A rank could not prepare its part of the step; raised on every rank, naming the rank and its reason."""


class ContractError(ValueError):
    """The installed Megatron does not scale losses as this version of megatron_rl_loss relies on."""


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError, AttributeError, BadBatchError, ContractError)
}


@cache
def _texts() -> ConfigParser:
    texts = ConfigParser(interpolation=None, delimiters=("=",))
    texts.read_string(files("megatron_rl_loss").joinpath("refusals.ini").read_text(encoding="utf-8"))
    return texts


def explain(name: str, /, **facts: object) -> str:
    """The text of a section of refusals.ini, with the facts in their places: ``given: rule. remedy.``"""
    text = _texts()[name]
    return "{}: {}. {}.".format(
        *(text[part].replace("\n", " ").format(**facts) for part in ("given", "rule", "remedy"))
    )


class _Unseen(str):
    """Stands for a fact that nobody has looked at, however it is to be formatted."""

    def __format__(self, spec: str) -> str:
        return str(self)


class _Unknown(dict[str, object]):
    def __missing__(self, name: str) -> object:
        return _Unseen(f"({name}: on the device)")


def explain_blindly(name: str) -> str:
    """The text of a refusal whose facts are on a device, where nobody looks."""
    text = _texts()[name]
    parts = (text[part].replace("\n", " ").format_map(_Unknown()) for part in ("given", "rule", "remedy"))
    return "{}: {}. {}.".format(*parts)


def refused(name: str, /, **facts: object) -> Exception:
    """The exception to raise for a refusal of refusals.ini, of the kind it says (ValueError unless it says one)."""
    return _KINDS[_texts()[name].get("kind", "ValueError")](explain(name, **facts))
