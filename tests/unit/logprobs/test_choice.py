"""Who reads the logits, what happens where Triton or values are wrong, and how many launches a call takes."""

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_oracle import BOTH, expected_of, relative
from interpreted import import_triton_anew, needs_triton, use_kernels
from logprob_ways import check, leaves_of, results_of, values_of
from ranks import run_ranks
from repository import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_loss import OutputLayer, Samples, log_probs_from_hidden, log_probs_from_logits, plan_step
from megatron_rl_loss.logprobs import choice, first_launch, flags, layer
from megatron_rl_loss.logprobs.choice import choose
from megatron_rl_loss.logprobs.kept_ids import KeptIds

# --- what goes wrong


def fall_back(step: str, way: str) -> list[str]:
    """A step of the kernels fails in the middle of a call; the warnings, and then who is chosen."""
    use_kernels()
    from megatron_rl_loss.logprobs import triton_kernels

    warnings = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    choice.logger.addHandler(handler)
    for number, name in enumerate(("kept ids", "five ids, padded vocabulary", "plain")):
        choice._failures.clear()

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("no C compiler")

        works = getattr(triton_kernels, step)
        setattr(triton_kernels, step, fail)
        results = results_of(way, name, torch.float32, BOTH, chunk_tokens=7)
        setattr(triton_kernels, step, works)
        check(results, expected_of(name, torch.float32), torch.float32)
        assert len(warnings) == number + 1
    why = choose(torch.zeros(2, 4), 1, kernel=None).why
    if step == "statistics":  # labels that are wrong are found then, too
        choice._failures.clear()
        setattr(triton_kernels, step, fail)
        with pytest.raises(ValueError, match="a label 9 in a vocabulary of 4"):
            log_probs_from_logits(torch.zeros(2, 4), torch.tensor([0, 9]), token_mask=[1, 1])
    return [warnings[0], why]


@needs_triton
@pytest.mark.parametrize(
    ("step", "way"), [("statistics", "logits"), ("combine", "one pass"), ("differentiate", "logits")]
)
def test_plain_torch_goes_on_where_triton_fails(step: str, way: str) -> None:
    ((warning, why),) = run_ranks(1, fall_back, step, way)
    assert warning.startswith("Triton failed (RuntimeError: no C compiler): plain torch makes log-probs")
    assert why == "Triton failed (RuntimeError: no C compiler)"


def arguments(**options: Any) -> dict[str, Any]:
    """Arguments of a call on 12 tokens and 80 ids."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 80, generator=draw)
    return {"logits": logits, "labels": torch.arange(12), **options}


MASK, KEEP = torch.arange(12) % 4 != 0, torch.rand(12, 80, generator=torch.Generator().manual_seed(1)) < 0.3
KEPT = KeptIds(KEEP.nonzero()[:, 1], torch.cat([torch.zeros(1).long(), KEEP.sum(1).cumsum(0)]))
#: Kinds of calls, each with a program of its own: what tells its launch from the plain one's.
KINDS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
    "a token mask": (arguments(token_mask=MASK), lambda given: given["mask"] is not None),
    "a mask of kept ids": (arguments(keep=KEEP), lambda given: given["keep"] is not None),
    "kept ids": (arguments(keep=KEPT), lambda given: given["kept"] is not None),
    "padding": (arguments(vocab_size=70), lambda given: given["held"] < 80),
    "entropy": (arguments(entropy=True), lambda given: given.get("entropy", given.get("h") is not None)),
    "four ids": (arguments(labels=torch.arange(48).view(12, 4)), lambda given: given["labels"].shape[1] == 4),
    "rows that are not aligned": (
        arguments(logits=torch.randn(12, 81)[:, 1:]), lambda given: given["logits"].data_ptr() % 16 != 0
    ),
    "rows of another stride": (
        arguments(logits=torch.randn(12, 84)[:, :80]), lambda given: given["logits"].stride(0) == 84
    ),
    "bfloat16": (arguments(logits=torch.randn(12, 80).bfloat16()), lambda given: given["logits"].dtype != torch.float),
    "labels of int32": (arguments(labels=torch.arange(12).int()), lambda given: given["labels"].dtype == torch.int32),
}  # fmt: skip
PLAIN = arguments()
#: Fewer tokens than rows that are compared of a call that has a mask.
FEW: dict[str, Any] = {"labels": torch.arange(4), "token_mask": [1, 0, 0.5, 1], "keep": KEEP[:4], "entropy": True}
FEW["logits"] = PLAIN["logits"][:4].bfloat16()


def difference(arguments: dict[str, Any]) -> float:
    """Of the kernels from plain torch."""
    values = []
    for kernel in (None, "torch"):
        leaf = arguments["logits"].detach().requires_grad_()
        made = log_probs_from_logits(leaf, **{k: v for k, v in arguments.items() if k != "logits"}, kernel=kernel)
        outputs = [value for value in made if value is not None]
        (gradient,) = torch.autograd.grad(outputs, leaf, [torch.ones_like(value) for value in outputs])
        values.append([*(value.detach() for value in outputs), gradient.float()])
    return max(float((a - b).abs().max()) for a, b in zip(*values, strict=True))


def plant(step: str) -> dict[str, tuple[str, float, bool]]:
    """A program of one kind of call is wrong by 5 %: what is warned of, how far results are off, and what goes on."""
    use_kernels(compare=True, wide=True)
    from megatron_rl_loss.logprobs import triton_kernels

    works, found, warnings = getattr(triton_kernels, step), {}, list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    choice.logger.addHandler(handler)
    assert difference(PLAIN) < 2e-2
    for name, (arguments, is_it) in KINDS.items():
        launched = list[bool]()

        def wrong(*, is_it: Any = is_it, launched: Any = launched, **given: Any) -> Any:
            launched.append(is_it(given))
            result = works(**given)
            if is_it(given) and step == "statistics":
                result[:, 2] *= 1.05
            if is_it(given) and step == "differentiate":
                given["into"].mul_(1.05)
            return result

        warnings.clear()
        setattr(triton_kernels, step, wrong)
        off = difference(arguments)
        told = "; ".join(warnings)
        launched.clear()
        difference(arguments)  # is told once, and launched no more
        found[name] = (told, off, not launched and warnings == told.split("; "))
        setattr(triton_kernels, step, works)
    warnings.clear()
    assert difference(PLAIN) < 2e-2  # goes on
    assert not warnings
    return found


@needs_triton
@pytest.mark.parametrize("step", ["statistics", "differentiate"])
def test_a_wrong_program_falls_back_alone_at_its_first_launch(step: str) -> None:
    """In whatever call it is made, after others that were right."""
    (found,) = run_ranks(1, plant, step)
    assert set(found) == set(KINDS)
    for name, (told, off, goes_on) in found.items():
        assert told.startswith(f"the kernel of {step} ("), (name, told)
        assert "differs from plain torch by" in told
        assert off < 2e-2, (name, off)  # of bfloat16, which the interpreter cuts off
        assert goes_on, name


def plant_in_others() -> list[str]:
    """A wrong `combine`, a wrong program for hidden states' chunks, and `kernel="triton"`, which compares nothing."""
    use_kernels(compare=True, wide=True)
    from megatron_rl_loss.logprobs import triton_kernels

    warnings = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    choice.logger.addHandler(handler)
    for step in ("combine", "statistics", "differentiate"):
        works = getattr(triton_kernels, step)

        def wrong(*, step: str = step, works: Any = works, **given: Any) -> Any:
            result = works(**given)
            if step == "differentiate":
                given["into"].mul_(1.01)
            elif step == "statistics":
                result[:, 1:3] *= 1.01
            return (result[0], result[1] * 1.01) if step == "combine" else result

        setattr(triton_kernels, step, wrong)
        for way in ("one pass", "two passes", "logits"):
            first_launch.compared.clear()
            for name in ("five ids, kept ids", "plain"):
                check(results_of(way, name, torch.float32, BOTH), expected_of(name, torch.float32), torch.float32)
        number = len(warnings)
        first_launch.compared.clear()
        log_probs_from_logits(PLAIN["logits"], PLAIN["labels"], kernel="triton")
        assert len(warnings) == number
        assert not first_launch.compared
        setattr(triton_kernels, step, works)
    return warnings


@needs_triton
def test_wrong_programs_of_every_step_and_of_hidden_states() -> None:
    (warnings,) = run_ranks(1, plant_in_others)
    assert {warning.partition(" (")[0] for warning in warnings} == {
        f"the kernel of {step}" for step in ("combine", "statistics", "differentiate")
    }


def agree() -> tuple[int, int, str]:
    """Right programs are compared once each: calls of the kernels, programs, and what was warned of."""
    counts = use_kernels(compare=True, wide=True)
    for _ in range(2):
        for arguments in [*(arguments for arguments, _ in KINDS.values()), FEW]:
            assert difference(arguments) < 2e-2
    assert all(first_launch.compared.values())
    return sum(counts.values()), len(first_launch.compared), choice.failure()


@needs_triton
def test_right_programs_are_compared_once() -> None:
    ((launched, programs, failure),) = run_ranks(1, agree)
    assert failure == ""
    assert launched == 3 * 2 * (len(KINDS) + 1) + programs


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has chosen nothing yet, and takes the host's tensors for a GPU's."""
    monkeypatch.setattr(choice, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(choice, "_failures", [])
    monkeypatch.setattr(choice, "COMPARES", False)
    choice._said.cache_clear()


LOGITS, LABELS = torch.zeros(3, 8), torch.tensor([0, 3, 7])


@pytest.mark.usefixtures("_fresh")
def test_a_missing_triton_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "megatron_rl_loss.logprobs.triton_kernels", None)  # its import fails
    values = [log_probs_from_logits(LOGITS, LABELS, kernel=kernel).log_probs for kernel in (None, None, "torch")]
    assert torch.equal(values[0], values[2])
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "Triton failed (ModuleNotFoundError" in caplog.text


@pytest.mark.usefixtures("_fresh")
def test_kept_ids_that_no_kernel_checks_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.zeros(4).long()

    def fail(*_: Any, **__: Any) -> None:
        ids[3] = 8  # as ids on a device, which are left to the kernels
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(choice, "_kernels", lambda: SimpleNamespace(statistics=fail))
    with pytest.raises(ValueError, match="KeptIds with ids from 0 to 8 in a vocabulary of 8: ids must be from"):
        log_probs_from_logits(LOGITS, LABELS, keep=KeptIds(ids, torch.tensor([0, 1, 1, 4])))
    assert choice.failure() == "Triton failed (RuntimeError: no C compiler)"


@pytest.mark.usefixtures("_fresh")
def test_one_function_chooses_and_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module: Any = SimpleNamespace()
    monkeypatch.setattr(choice, "_kernels", lambda: module)
    caplog.set_level(logging.INFO)

    def why(logits: Tensor = LOGITS, ids: int = 1, **more: Any) -> str:
        chosen = choose(logits, ids, **{"kernel": None, **more})
        assert (chosen.kernels is module) == (chosen.why == "kernels are the default on a GPU")
        return chosen.why

    assert why() == why(LOGITS.bfloat16()) == why(LOGITS.half()) == "kernels are the default on a GPU"
    assert why(kernel="torch") == "kernel='torch' asks for it"
    assert why(LOGITS.to("meta")) == "the logits are on meta"
    assert why(LOGITS.double()) == "the kernels do not read torch.float64"
    assert why(LOGITS.t()) == "the vocabulary is not the last dimension in memory"
    assert why(rest=True) == "the kernels know no rest of ids"
    assert why(teacher=True) == "the kernels know no teacher"
    assert why(ids=129) == "the kernels take 1 to 128 ids per token, not 129"
    assert why(ids=0) == "the kernels take 1 to 128 ids per token, not 0"
    why()
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "log-probs are made by Triton kernels: kernels are the default on a GPU"
    assert len(messages) == len(set(messages)) == 9


def flag() -> None:
    use_kernels()
    from megatron_rl_loss.logprobs import triton_kernels

    logits, labels = torch.randn(3, 8), torch.tensor([0, 8, -100])
    log_probs = log_probs_from_logits(logits, labels, token_mask=[1, 1, 0]).log_probs
    assert log_probs.isnan().tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"a label 8 in a vocabulary of 8: labels must be ids .* Pass token_mask"):
        log_probs_from_logits(logits, labels[:1].expand(3))
    leaf = logits.requires_grad_()  # once told, it is over
    values = log_probs_from_logits(leaf, LABELS, vocab_size=7).log_probs
    with pytest.raises(ValueError, match="a label 7 in a vocabulary of 7"):
        values.sum().backward()
    for name in ("float32", "bfloat16"):
        log_probs_from_logits(logits.softmax(-1).to(getattr(torch, name)), LABELS)
        with pytest.raises(ValueError, match="whose first row is above 0 and sums to 1: these are probabilities"):
            flags.raise_flagged()
    log_probs_from_logits(logits.log_softmax(-1), LABELS)
    flags.raise_flagged()
    for mask, is_wrong in (([1, 0.5, 0], False), ([1, -1, 0], True), ([1, torch.nan, 0], True)):
        device_arguments: Any = {
            "mask": torch.tensor(mask),
            "keep": None,
            "kept": None,
            "flags": flags.tensor(),
            "check_first_row": False,
        }
        triton_kernels.statistics(
            logits, LABELS[:, None], first=0, held=8, size=8, scale=1.0, entropy=False, **device_arguments
        )
        assert bool(flags.tensor()[4]) == is_wrong
        if is_wrong:
            with pytest.raises(ValueError, match="a token mask with a number below 0"):
                flags.raise_flagged()
    for ids, wrong in (([0, 3, 4, 7, 5, 5], None), ([0, 3, 4, 7, 8, 5], 8), ([0, -1, 4, 7, 2, 5], -1)):
        kept = KeptIds(torch.tensor(ids), torch.tensor([0, 4, 4, 6])).for_kernels(slice(None), 8, torch.device("cpu"))
        shard: Any = {"first": 4, "held": 4, "size": 8, "scale": 1.0, "flags": flags.tensor(), "keep": None}
        shard |= {"entropy": False, "mask": None, "kept": kept, "check_first_row": False}
        triton_kernels.statistics(logits[:, 4:], LABELS[:, None], **shard)
        if wrong is None:
            flags.raise_flagged()
        else:
            with pytest.raises(ValueError, match=f"KeptIds with an id {wrong} in a vocabulary of 8: ids must be from"):
                flags.raise_flagged()


@needs_triton
def test_wrong_values_are_told_when_the_next_pass_begins() -> None:
    run_ranks(1, flag)


def test_flags_that_nobody_read_are_logged_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    flags.tensor()[:3] = torch.tensor([1, 9, 8])
    flags._log_flagged()
    assert "a label 9 in a vocabulary of 8" in caplog.text
    flags.raise_flagged()


def test_a_step_does_not_begin_where_a_flag_is_set() -> None:
    """`plan_step` raises it, as any error of a rank, on all ranks."""
    flags.tensor()[:3] = torch.tensor([1, 9, 8])
    samples = [Samples([torch.ones(4)])]
    with pytest.raises(ValueError, match="a label 9 in a vocabulary of 8"):
        plan_step(samples, "token_mean", dp_group=None)
    assert len(plan_step(samples, "token_mean", dp_group=None)) == 1


# --- what it costs


class Operations(TorchDispatchMode):
    """The operations that launch a kernel of torch, or copy to a device."""

    FREE = ("view", "reshape", "alias", "detach", "slice", "unsqueeze", "select", "empty", "transpose", "t", "expand")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].strip("_")
        if not name.startswith(self.FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_fresh")
def test_few_launches_beside_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most six in a call, forward and backward, without those of the loss."""
    launched = list[str]()

    def statistics(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        launched.append("statistics")
        return torch.empty(len(labels), 3 + labels.shape[1])

    def combine(tables: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        launched.append("combine")
        return torch.empty(tables.shape[1], tables.shape[2] - 3), torch.empty(tables.shape[2], tables.shape[1])

    def differentiate(*_: Any, **__: Any) -> bool:
        launched.append("differentiate")
        return True

    stand_in = SimpleNamespace(statistics=statistics, combine=combine, differentiate=differentiate)
    monkeypatch.setattr(choice, "_kernels", lambda: stand_in)
    options: list[dict[str, Any]] = [{}, {"entropy": True}, {"token_mask": [1, 0, 1]}]
    options += [{"keep": KeptIds(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 4]))}]
    options += [{"keep": LOGITS == 0, "vocab_size": 8}, {"gradient_in_place": True, "temperature": 0.5}]
    for logits, more in itertools.product((LOGITS, LOGITS.bfloat16()), options):
        leaf = logits.clone().requires_grad_()
        with Operations() as seen:
            values = log_probs_from_logits(leaf.view(3, 8), LABELS, **more)
            outputs = [value for value in values if value is not None]
            ones = [torch.empty_like(value) for value in outputs]
            torch.autograd.grad(outputs, leaf, ones)
        assert len(seen.names) <= 6, seen.names
        assert launched == ["statistics", "combine", "differentiate"]
        launched.clear()
    hidden, weight = torch.zeros(8, 4, requires_grad=True), torch.zeros(8, 4, requires_grad=True)
    with Operations() as seen:
        values = log_probs_from_hidden(hidden, OutputLayer(weight, chunk_tokens=4), torch.zeros(8).long())
        torch.autograd.grad(values.log_probs, (hidden, weight), torch.empty(8))
    others = [name for name in seen.names if name not in ("mm", "addmm")]
    assert seen.names.count("mm") + seen.names.count("addmm") == 2 * 4
    assert len(others) <= 6, others
    assert launched == ["statistics", "statistics", "combine", "differentiate", "differentiate"]


def count_bytes() -> dict[str, float]:
    import_triton_anew()
    sys.path.insert(0, str(ROOT / "tools" / "bench"))
    import logit_bytes

    def per_logit(dtype: torch.dtype, kernel: str | None) -> float:
        way = partial(log_probs_from_logits, entropy=True, kernel=kernel)
        choice.COMPARES = False  # which moves some once in a process
        return logit_bytes.count(way, dtype, kernel is None).bytes / logit_bytes.LOGITS

    bytes_of = {str(dtype): per_logit(dtype, None) for dtype in (torch.float32, torch.bfloat16)}
    return bytes_of | {"plain torch": per_logit(torch.float32, "torch")}


@needs_triton
@pytest.mark.slow
def test_the_kernels_move_what_must_move() -> None:
    """One read, and one read and one write; and a hundredth for labels and the first row's second read."""
    pytest.importorskip("megatron.core")
    (bytes_of,) = run_ranks(1, count_bytes)
    assert 12 <= bytes_of["torch.float32"] <= 12 * 1.02
    assert 6 <= bytes_of["torch.bfloat16"] <= 6 * 1.02
    assert bytes_of["plain torch"] > 5 * 12  # negative control


def test_the_weights_gradient_without_a_product_that_adds_wider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the host torch has none."""
    monkeypatch.setattr(layer, "_narrow", [])
    total, left, right = torch.ones(3, 4), torch.ones(3, 5).bfloat16(), torch.ones(5, 4).bfloat16()
    assert not layer.add_wider(total, left, right)
    assert not layer.add_wider(total, left, right)
    assert torch.equal(total, torch.ones(3, 4))
    assert len(layer._narrow) == bool(hasattr(torch.ops.aten.addmm, "dtype_out"))


@pytest.mark.gpus
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_weights_gradient_added_wider_on_a_gpu(dtype: torch.dtype) -> None:
    if os.environ.get("TEST_DEVICE") != "cuda":
        pytest.skip("needs a GPU and TEST_DEVICE=cuda")
    total, left, right = torch.randn(96, 64).cuda(), torch.randn(96, 300).cuda(), torch.randn(300, 64).cuda()
    expected = total.double() + left.to(dtype).double() @ right.to(dtype).double()
    if layer.add_wider(total, left.to(dtype), right.to(dtype)):
        assert relative(total, expected) <= 300 * 2.0**-24


@pytest.mark.gpus
def test_on_a_gpu_the_host_waits_for_nothing_and_is_told_of_a_wrong_label() -> None:
    if os.environ.get("TEST_DEVICE") != "cuda":
        pytest.skip("needs a GPU and TEST_DEVICE=cuda")
    logits, labels = torch.randn(64, 512).cuda().bfloat16().requires_grad_(), torch.arange(64).cuda()
    mask = (torch.arange(64) % 3 > 0).float().cuda()

    def differentiate(labels: Tensor) -> Tensor:
        values = log_probs_from_logits(logits, labels, entropy=True, token_mask=mask)
        torch.autograd.grad([*values], logits, [torch.ones_like(value) for value in values])
        return values.log_probs.detach()

    expected = log_probs_from_logits(logits.detach().double(), labels, token_mask=mask.cpu()).log_probs
    differentiate(labels)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        log_probs = differentiate(labels)
        wrong = log_probs_from_logits(logits, labels.masked_fill(labels == 1, 512), token_mask=mask).log_probs
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert choice.failure() == ""
    assert relative(log_probs, expected) <= 1e-5
    assert wrong.isnan().nonzero().tolist() == [[1]]
    with pytest.raises(ValueError, match="a label 512 in a vocabulary of 512"):
        flags.raise_flagged()


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    pytest.importorskip("tabulate")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "compile_kernels.py"), "--quick"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "sm_90" in done.stdout
    assert "gradient_at_labels" in done.stdout


def test_values_and_gradients_of_leaves_on_the_host_need_no_kernel() -> None:
    """The negative control of all counts above: without `use_kernels`, nobody launches."""
    assert choose(leaves_of("plain")["hidden"], 1, kernel=None).why == "the logits are on cpu"
    assert values_of("logits", "plain", leaves_of("plain"))
