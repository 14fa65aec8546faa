"""Online GRPO on Megatron: sample from the current policy, check, train, repeat. A flag sets the aggregation.

    python examples/online_grpo.py --output runs/online
    torchrun --nproc-per-node 4 examples/online_grpo.py --output runs/online --tensor-model-parallel-size 2 \\
        --context-parallel-size 2 --loss-aggregation constant --loss-aggregation-divisor 24

A model of 0.1 M parameters learns to add (online/task.py) in minutes on one CPU core, after a supervised warm start.
`online/__init__.py` lists the files; docs/online.md has results and limits.
"""

import argparse
import os
import random
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

if not torch.cuda.is_available():
    import megatron_on_cpu

    megatron_on_cpu.install()  # before megatron is imported

from megatron.core import parallel_state
from online.engine import sample_with_engine
from online.policy import (
    HIDDEN_SIZE,
    Losses,
    Policy,
    Trainer,
    build_policy,
    likeliest,
    load_policy,
    old_log_probs,
    save_policy,
)
from online.report import Numbers, Report, describe, progress_line, zero_variance_groups
from online.rows import deal, split_over_samples
from online.sampler import Responses, draw_uniforms, one_seed, sample, sample_together
from online.task import VOCABULARY, Problem, decode, draw_problems, encode
from online.warm_start import warm_start
from rollouts import Rollout, read_rollouts, with_advantages, write_rollouts

from megatron_rl_loss import AtIds, Microbatch, Term, add_loss_aggregation_args, divergence_at_ids, ppo_clip_loss
from megatron_rl_loss.megatron.flags import AggregationSettings, validate_loss_aggregation_args

# What the random numbers of `draw_uniforms` are for.
TRAINING, HELD_OUT, WARM_START = range(3)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="Folder for the run; replaces an earlier run.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of weights, problems and samples.")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1, help="For training; sampling splits rows.")
    step = parser.add_argument_group("a step")
    step.add_argument("--steps", type=int, default=200)
    step.add_argument("--prompts-per-step", type=int, default=32)
    step.add_argument("--responses-per-prompt", type=int, default=8)
    step.add_argument(
        "--sampler",
        choices=["cached", "megatron"],
        default="cached",
        help="cached: online/sampler.py; megatron: its own engine.",
    )
    step.add_argument("--samples-per-rollout", type=int, default=1, help="Split every rollout like agent turns.")
    step.add_argument("--num-microbatches", type=int, default=2, help="Micro-batches of each data-parallel rank.")
    step.add_argument("--inner-steps", type=int, default=1, help="Optimizer steps on the rollouts of a step.")
    step.add_argument("--lr", type=float, default=2e-4)
    step.add_argument("--lr-warmup-steps", type=int, default=10)
    step.add_argument("--clip-low", type=float, default=0.2, help="PPO clip range below 1.")
    step.add_argument("--clip-high", type=float, default=0.2, help="PPO clip range above 1.")
    step.add_argument("--no-advantage-std", action="store_true", help="Do not divide advantages by the group's std.")
    start = parser.add_argument_group("warm start, weights and rollouts")
    start.add_argument("--warm-start-reward", type=float, default=0.3, help="Reward on training prompts that ends it.")
    start.add_argument("--load", type=Path, default=None, help="Weights of --save-start; no warm start then.")
    start.add_argument("--save-start", type=Path, default=None, help="Folder for the weights after the warm start.")
    start.add_argument("--save", type=Path, default=None, help="Folder for the weights at the end.")
    start.add_argument("--save-rollouts", type=Path, default=None, help="Folder for rollouts, a JSONL file per step.")
    start.add_argument("--replay-rollouts", type=Path, default=None, help="Folder of rollouts to train on.")
    learn = parser.add_argument_group("a teacher", "Adds its divergence from the policy, a reverse KL, to the loss.")
    learn.add_argument("--teacher", type=Path, default=None, help="Weights that --save wrote in an earlier run.")
    learn.add_argument("--teacher-top-k", type=int, default=16, help="The teacher's likeliest ids per token.")
    learn.add_argument("--policy-coef", type=float, default=1.0, help="Coefficient of the policy loss.")
    learn.add_argument(
        "--hidden-size", type=int, default=HIDDEN_SIZE, help="For the policy; a teacher has the default."
    )
    seen = parser.add_argument_group("evaluation and logs")
    seen.add_argument("--eval-interval", type=int, default=25, help="Steps between evaluations.")
    seen.add_argument("--eval-prompts", type=int, default=1024, help="Held-out prompts, one response each.")
    seen.add_argument("--print-interval", type=int, default=5, help="Steps between progress lines.")
    seen.add_argument("--tensorboard", action="store_true", help="Also write TensorBoard events to the folder.")
    seen.add_argument("--wandb-project", default=None, help="Also log to wandb, under this project.")
    args = add_loss_aggregation_args(parser).parse_args(argv)
    for name, value in vars(args).items():
        if type(value) is int and name != "seed" and value < (0 if name == "lr_warmup_steps" else 1):
            parser.error(f"--{name.replace('_', '-')} {value}: the number is too small. Give a larger one.")
    if args.teacher is None and args.policy_coef != 1:
        parser.error(
            f"--policy-coef {args.policy_coef} without --teacher: the flag needs the loss of a teacher. Add --teacher."
        )
    return args


def start_processes(args: argparse.Namespace) -> None:
    """Make torch's and Megatron's process groups; without a launcher, for one process."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:  # small matrices: more threads would wait for each other
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, context_parallel_size=args.context_parallel_size
    )


def draw_rollouts(
    policy: Policy, problems: list[Problem], *, responses: int, seed: int, sampler: str
) -> tuple[list[Rollout], Numbers]:
    """`responses` checked rollouts of each problem, prompt by prompt, and their statistics; alike on all ranks."""
    prompts = torch.tensor([encode(problem.prompt) for problem in problems]).repeat_interleave(responses, dim=0).cuda()
    uniforms = draw_uniforms(len(prompts), seed).cuda()
    tp, replicas = policy.groups.tp, policy.groups.dp_cp

    def draw(rows: slice) -> Responses:
        if sampler == "megatron":
            return sample_with_engine(policy.model, prompts[rows], seed=one_seed(seed, replicas.rank()))
        return sample(policy.model, prompts[rows], uniforms[rows], tp_group=tp)

    drawn = sample_together(draw, len(prompts), replica_group=replicas)
    tokens, lengths = drawn.tokens.tolist(), drawn.lengths.tolist()
    log_probs = None if drawn.log_probs is None else drawn.log_probs.tolist()
    rollouts = []
    for row, n in enumerate(lengths):
        prompt, attempt = divmod(row, responses)
        rollouts.append(
            Rollout(
                prompt_tokens=encode(problems[prompt].prompt),
                response_tokens=tokens[row][:n],
                loss_mask=[1.0] * n,
                reward=problems[prompt].reward(decode(tokens[row][:n])),
                prompt_id=prompt,
                rollout_id=f"{prompt}.{attempt}",
                old_log_probs=None if log_probs is None else log_probs[row][:n],
            )
        )
    entropy = drawn.mean_entropy()
    return rollouts, describe(rollouts) | ({} if entropy is None else {"entropy": entropy})


def rewarded_on_training_prompts(policy: Policy, step: int, args: argparse.Namespace) -> float:
    """The reward that the warm start waits for."""
    problems = draw_problems("training", 256, random.Random(f"tried {args.seed} {step}"))
    seed = one_seed(args.seed, WARM_START, step)
    return draw_rollouts(policy, problems, responses=1, seed=seed, sampler=args.sampler)[1]["reward"]


def held_out(policy: Policy, step: int, args: argparse.Namespace) -> Numbers:
    """Evaluate the same held-out problems each time, one response each, sampled as in training."""
    problems = draw_problems("held out", args.eval_prompts, random.Random(f"held out {args.seed}"))
    seed = one_seed(args.seed, HELD_OUT, step)
    _, numbers = draw_rollouts(policy, problems, responses=1, seed=seed, sampler=args.sampler)
    return {f"held_out_{name}": value for name, value in numbers.items()}


def policy_losses(args: argparse.Namespace) -> Losses:
    """GRPO's clipped surrogate of group-relative advantages; with a teacher also the divergence from it."""

    def losses(log_probs: Tensor, microbatch: Microbatch) -> tuple[Tensor | dict[str, Term], dict[str, Tensor]]:
        rows = microbatch.data
        if rows.teacher_ids is not None:
            log_probs, at_ids = log_probs[..., 0], AtIds(log_probs[..., 1:-1], log_probs[..., -1])
        clip = {"clip_low": args.clip_low, "clip_high": args.clip_high}
        advantages = microbatch.local(rows.advantages).cuda()
        loss = ppo_clip_loss(log_probs, rows.old_log_probs, advantages, microbatch, **clip)
        ratio = (-loss.ppo_kl).exp()
        # Among samples of the old policy the mean ratio is 1 whatever the new one is: look at the distance too.
        metrics = {"ratio": ratio, "ratio_gap": (ratio - 1).abs(), "clip_fraction": loss.clipped, "ppo_kl": loss.ppo_kl}
        if rows.sampler_log_probs is not None:  # how far the sampler and the trainer are apart
            sampled = microbatch.local(rows.sampler_log_probs).cuda()
            metrics["sampler_gap"] = (rows.old_log_probs - sampled).abs()
        if rows.teacher_ids is None:
            return loss.per_token_loss, metrics
        kl = divergence_at_ids(at_ids, rows.teacher_log_probs, microbatch, kind="reverse_kl")
        return {"pg_loss": Term(loss.per_token_loss, coef=args.policy_coef), "teacher_kl": Term(kl)}, metrics

    return losses


def train_on(
    rollouts: list[Rollout], trainer: Trainer, teacher: Policy | None, step: int, args: argparse.Namespace
) -> Numbers:
    """Run the optimizer steps on the rollouts of a step."""
    groups = trainer.policy.groups
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="all rewards are equal")  # the report counts such groups
        rollouts = with_advantages(rollouts, normalize_by_std=not args.no_advantage_std)
    samples = [part for rollout in rollouts for part in split_over_samples(rollout, args.samples_per_rollout)]
    hand = {"dp_rank": groups.dp.rank(), "dp_size": groups.dp.size(), "cp_size": groups.cp.size()}
    microbatches = deal(samples, num_microbatches=args.num_microbatches, **hand)
    for rows in microbatches:
        rows.old_log_probs = old_log_probs(trainer.policy, rows)
        if teacher is not None:
            rows.teacher_ids, rows.teacher_log_probs = likeliest(teacher, rows, args.teacher_top_k)
    lr_factor = min(1.0, step / max(args.lr_warmup_steps, 1))
    reports = [trainer.step(microbatches, policy_losses(args), lr_factor=lr_factor) for _ in range(args.inner_steps)]
    first = {name: reports[0][name] for name in ("ratio", "ratio_gap")}
    return {**reports[-1], **first}  # at ratio 1 nothing is clipped, and the loss says little


def rollouts_of_step(
    policy: Policy, step: int, rng: random.Random, args: argparse.Namespace
) -> tuple[list[Rollout], Numbers]:
    """Rollouts of a step: drawn from the current policy, or read from a file."""
    name = f"step_{step:04}.jsonl"
    if args.replay_rollouts is not None:
        rollouts = read_rollouts(args.replay_rollouts / name, vocab_size=len(VOCABULARY))
        return rollouts, describe(rollouts)
    problems = draw_problems("training", args.prompts_per_step, rng)
    asked = {"responses": args.responses_per_prompt, "sampler": args.sampler}
    rollouts, numbers = draw_rollouts(policy, problems, seed=one_seed(args.seed, TRAINING, step), **asked)
    if args.save_rollouts is not None and dist.get_rank() == 0:
        args.save_rollouts.mkdir(parents=True, exist_ok=True)
        write_rollouts(args.save_rollouts / name, rollouts)
    return rollouts, numbers


def train(policy: Policy, settings: AggregationSettings, args: argparse.Namespace, report: Report) -> None:
    """Run all steps, from the weights of the warm start."""
    teacher = None
    if args.teacher is not None:
        teacher = build_policy(args.seed)
        load_policy(teacher, args.teacher)
    trainer = Trainer(policy, settings, lr=args.lr, beta2=0.99)
    before = held_out(policy, 0, args)
    report.write(0, before)
    rng = random.Random(f"training {args.seed}")
    began = time.monotonic()
    for step in range(1, args.steps + 1):
        rollouts, numbers = rollouts_of_step(policy, step, rng, args)
        numbers["zero_variance_groups"] = zero_variance_groups(rollouts)
        numbers |= train_on(rollouts, trainer, teacher, step, args)
        evaluated = step % args.eval_interval == 0 or step == args.steps
        if evaluated:
            numbers |= held_out(policy, step, args)
        report.write(step, numbers)
        if evaluated or step % args.print_interval == 0 or step == 1:
            report.say(progress_line(step, args.steps, numbers, time.monotonic() - began))
    first, last = before["held_out_reward"], numbers["held_out_reward"]
    report.say(
        f"held-out reward: {first:.3f} before, {last:.3f} after {args.steps} steps, on {args.eval_prompts} prompts"
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    settings = validate_loss_aggregation_args(args)
    start_processes(args)
    chosen = {**vars(args), "aggregation": settings.modes.describe(), "world_size": dist.get_world_size()}
    with Report(args.output, chosen, tensorboard=args.tensorboard, wandb_project=args.wandb_project) as report:
        policy = build_policy(args.seed, args.hidden_size)
        if args.load is not None:
            load_policy(policy, args.load)
        else:
            warm_start(
                policy,
                lambda step: rewarded_on_training_prompts(policy, step, args),
                until_reward=args.warm_start_reward,
                num_microbatches=args.num_microbatches,
                seed=args.seed,
                say=report.say,
            )
        if args.save_start is not None:
            save_policy(policy, args.save_start)
        train(policy, settings, args, report)
        if args.save is not None:
            save_policy(policy, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":  # saving a checkpoint starts helper processes that import this file again
    main()
