"""Refusals of a plan and its micro-batches, each beside its nearest legal neighbour."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from refusals import refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import Metric, Samples, Term, plan_step, prove_step
from megatron_rl_loss.core.plan import Plan


def plan(samples: Any, mode: Any = "token_mean", **options: Any) -> Plan:
    return plan_step(samples, mode, **{"dp_group": None, **options})


def loss_of_terms(terms: Callable[[Tensor], Any], metric: Any = None) -> Any:
    metrics = {} if metric is None else {"kl": metric}
    return plan([Samples([torch.ones(4)])])[0].loss(terms(torch.ones(4, requires_grad=True)), metrics)


def pair(losses: Tensor, kl: Any = None) -> Any:
    return {"pg": losses, "kl": losses if kl is None else kl}


def carried(form: Any, per_token_loss: bool = False, losses: Any = None) -> Any:
    own_plan = plan([TWO], per_token_loss=per_token_loss)
    return own_plan[0].loss(torch.ones(2, requires_grad=True) if losses is None else losses, form=form)


def finish(*reports: Any, trained: bool = True) -> Any:
    whole_plan = plan([TWO])
    if trained:
        whole_plan[0].loss(torch.ones(2, requires_grad=True))
    return whole_plan.finish(*reports)


def proved(model: Any, whole_plan: Any, own_losses: Any = None) -> None:
    with prove_step(model, whole_plan, level="off", own_losses=own_losses):
        pass


AVERAGED = "averaged over ranks"
X, TWO = torch.ones(4), Samples([torch.ones(2)])
MODULE, STEP = torch.nn.Linear(1, 1), plan([TWO])
test_refusals = refusal_tests(
    {
        **refusals(
            plan,
            ((TWO,), "samples is a Samples: it must be a list with one Samples", ([TWO],)),
            (([{}],), "the samples of micro-batch 0 are a dict", ([TWO],)),
            ((lambda: None,), "the function of the samples returned None", (lambda: [TWO],)),
            error=TypeError,
        ),
        **refusals(
            lambda **options: plan([TWO], **options),
            ({"replica_groups": 3}, r"replica_groups is a int: .*Pass \[group\]", {"replica_groups": [None]}),
            ({"terms": ["kl"]}, "terms is a list: it must be a dict", {"terms": {"kl": "sample_mean"}}),
            ({"terms": {1: "sample_mean"}}, "terms has the key 1: it must be a dict", {"terms": {"kl": "sample_mean"}}),
            ({"term_masks": "kl"}, r"term_masks is 'kl'.*Pass \['kl'\]", {"term_masks": []}),
            ({"term_masks": {"kl"}}, "term_masks is a set: it must be a list of names", {"term_masks": ()}),
            ({"per_token_loss": "no"}, "per_token_loss is 'no': it must be True or False", {"per_token_loss": False}),
            ({"term_masks": iter(["kl"])}, "term_masks is a list_iterator", {"term_masks": ()}),
            error=TypeError,
        ),
        **refusals(
            finish,
            (({"pg_loss": X},), "reports is one report", ([{"pg_loss": X}],)),
            (([(X, {"pg_loss": X})],), "reports of tuples: they must be the dicts", ([{"pg_loss": X}],)),
            ((None,), "reports is a NoneType: it must be a list of what loss.. returned last", ()),
            ((3,), "reports is a int: it must be a list", ([3],)),
            error=TypeError,
        ),
        **refusals(finish, ({"trained": False}, "none of which made a loss: .* Call microbatch.loss", {})),
        **refusals(
            lambda metrics: plan([TWO])[0].loss(torch.ones(2, requires_grad=True), metrics),
            (([X[:2]],), "metrics is a list: it must be a dict", ({"entropy": X[:2]},)),
            (({1: X[:2]},), "metrics has the key 1: it must be a dict whose keys are names", ({"entropy": X[:2]},)),
            error=TypeError,
        ),
        **refusals(
            lambda samples, options: plan(samples, **options),
            (([TWO], {"num_microbatches": 2}), "1 Samples for 2 micro-batches",
             ([TWO, Samples([[1]])], {"num_microbatches": 2})),
            (([TWO], {"num_microbatches": -1}), "num_microbatches is -1", ([TWO], {"num_microbatches": 1})),
            (([], {}), "0 Samples for one or more", ([Samples([])], {})),
            ((None, {}), "neither samples nor num_microbatches", ([TWO], {})),
            (([TWO], {"mode": "prompt_mean"}), "samples without prompt_ids", ([TWO], {"mode": "sample_mean"})),
            (([TWO], {"mode": "mean"}), "there is no such mode", ([TWO], {})),
            (([TWO], {"mode": "constant"}), "without a divisor", ([TWO], {"mode": "constant", "divisor": 2})),
            (([TWO], {"empty_step": "stop"}), "there is no such empty_step", ([TWO], {"empty_step": "error"})),
            *(
                (([TWO], {"terms": {name: "token_mean"}}), f"terms with '{name}': terms are those beside the policy",
                 ([TWO], {"terms": {"kl": "token_mean"}}))
                for name in ("pg", "loss", "")
            ),
            (([TWO], {"term_masks": ["kl"]}), "the samples have no mask 'kl'", ([TWO], {})),
            (([TWO], {"dynamic_cp": True}), "pg_collection or dynamic_cp without a model", ([TWO], {})),
            (([TWO], {"model": TWO, "per_token_loss": True}), "model= together with groups", ([TWO], {})),
            (([TWO], {"model": TWO, "dp_group": ..., "gradients": AVERAGED}), "gradients or per_token_loss: .*model "
             "alone", ([TWO], {"gradients": AVERAGED})),
            (([TWO], {"gradients": "mean"}), "gradients= 'mean': there is no .* averaged over ranks, summed over ranks",
             ([TWO], {"gradients": "summed over ranks"})),
        ),
        **refusals(
            carried,
            (("mean",), r"form='mean': there is no such form.*'nemo_rl', or leave form out: .*gradients=", (None,)),
            (([],), r"form=\[\]: there is no such form", (None,)),
            (("tuple",), "form='tuple': there is no such form. Choose one of '3-tuple'", ("3-tuple",)),
            (("2-tuple", True), "form='2-tuple' with per-token loss.*Turn calculate_per_token_loss off", ("2-tuple",)),
            (("slime", True), "form='slime' with per-token loss", ("slime",)),
            (("nemo_rl",), "form='nemo_rl' without per-token loss", ("nemo_rl", True)),
            ((None, False, torch.ones(2)), "a loss without a graph", (None,)),
        ),
        **refusals(
            loss_of_terms,
            ((lambda x: {},), "there must be at least one", (pair,)),
            ((lambda x: {"loss": x, "kl": x},), r"a loss of the terms \['loss', 'kl'\]", (pair,)),
            ((pair, Metric(X)), "a metric named 'kl'", (lambda x: {"pg": x}, Metric(X))),
            *(
                ((lambda x, coef=coef: pair(x, Term(x, coef=coef)),), "'kl' with coef=.* a finite number", (pair,))
                for coef in (math.nan, "2", True)
            ),
            ((lambda x: pair(x, x[:3]),), r"the term 'kl' of shape \(3,\)", (lambda x: pair(x, x[None]),)),
            ((lambda x: pair(x, Term(x, units="active")),), "'kl' with units or a divisor and no mode", (pair,)),
            ((lambda x: pair(x, Term(x, "prompt_mean")),), "'kl': .* samples without prompt_ids", (pair,)),
            ((lambda x: pair(x, Term(x, mask="wrong")),), r"'kl': the samples have no mask 'wrong' \(", (pair,)),
            ((lambda x: x, Metric(X[:3])), r"the metric 'kl' of shape \(3,\)", (lambda x: x, Metric(X))),
            ((lambda x: x, Metric(X[:3], kind="max")), r"the metric 'kl' of shape \(3,\)", (lambda x: x, X)),
            ((lambda x: x, Metric(X, "token")), "over 'token': .*one of samples, tokens", (lambda x: x, Metric(X))),
            ((lambda x: x, Metric(X, "constant")), "a metric has no divisor. Pass 'none'", (lambda x: x, Metric(X))),
            ((lambda x: x, Metric(X, "prompts")), "'kl': .*samples without prompt_ids", (lambda x: x, Metric(X))),
        ),
        **refusals(
            loss_of_terms,
            ((lambda x: {"pg": x, 1: x},), "losses has the key 1: it must be a dict whose keys are names", (pair,)),
            ((lambda x: pair(x, SimpleNamespace(per_token_loss=x)),), "'kl' is a .*Pass its .per_token_loss", (pair,)),
            ((lambda x: x, X.int()), "the metric 'kl' is torch.int32", (lambda x: x, X.half())),
            error=TypeError,
        ),
        **refusals(
            lambda **options: Metric(X, **options),
            ({"kind": "std"}, "Choose one of mean, min, max, variance, ess", {"kind": "ess"}),
        ),
        **refusals(
            lambda over: Metric(X, over),
            ((None,), "a metric over None: over must be the name of a mode or of ids", ("none",)),
            error=TypeError,
        ),
        **refusals(
            proved,
            ((STEP, MODULE), "model is a Plan: .* Pass the model first and the plan second", (MODULE, STEP)),
            ((MODULE, STEP[0]), "plan is a Microbatch: it must be the plan of this step", (MODULE, STEP)),
            ((MODULE, None), "plan is a NoneType", (MODULE, STEP)),
            (("net", STEP), "model is a str: .* Pass the model first", (MODULE, STEP)),
            ((torch.nn.Linear(1, 1), STEP, lambda: X), r"own_losses is a function: it must be OwnLosses\(",
             (MODULE, STEP, None)),
            error=TypeError,
        ),
        **refusals(
            lambda tokens: plan([Samples([[1, 1]], tokens=torch.tensor([7, 8]))])[0].check_tokens(tokens),
            (([7, 8],), "check_tokens of a list: it must be the tensor that", (torch.tensor([7, 8]),)),
            error=TypeError,
        ),
        **refusals(
            lambda key: plan([TWO])[0] if key is None else plan([TWO])[0][key],
            (("tokens",), r"microbatch\['tokens'\]: a Microbatch is not your batch. Write .*next_microbatch", (None,)),
            error=TypeError,
        ),
    }
)  # fmt: skip
