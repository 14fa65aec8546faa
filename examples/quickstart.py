"""A step has one gradient, however it is cut into micro-batches. Needs torch alone."""

import torch

from megatron_rl_loss import Samples, plan_step, ppo_clip_loss

RESPONSES = [[0, 1, 2, 2, 1], [0, 2], [1], [2, 2, 0]]  # token ids of four responses to two prompts
PROMPTS, ADVANTAGES = ["a", "a", "b", "b"], [1.0, -1.0, 0.5, -0.5]


def gradient(cut: list[list[int]], *, exact: bool) -> torch.Tensor:
    """The gradient of three logits, accumulated over micro-batches; a cut names the responses of each."""
    logits = torch.zeros(3, requires_grad=True)
    tokens = [torch.tensor([token for row in rows for token in RESPONSES[row]]) for rows in cut]
    masks = [[[1] * len(RESPONSES[row]) for row in rows] for rows in cut]
    prompts = [[PROMPTS[row] for row in rows] for rows in cut]
    batches = [Samples(m, prompt_ids=p, tokens=t) for m, p, t in zip(masks, prompts, tokens, strict=True)]
    for rows, labels, batch, microbatch in zip(cut, tokens, batches, plan_step(batches, "prompt_mean"), strict=True):
        log_probs = logits.log_softmax(0)[labels]
        advantages = batch.in_buffer(torch.tensor([ADVANTAGES[row] for row in rows]))
        losses = ppo_clip_loss(log_probs, log_probs.detach(), advantages, microbatch).per_token_loss
        loss = microbatch.loss(losses) if exact else losses.mean() / len(cut)
        loss.backward()
    assert logits.grad is not None
    return logits.grad


if __name__ == "__main__":
    print(f"{'responses by micro-batch':<25}{'prompt_mean':<28}a mean per micro-batch")
    for cut in ([[0, 1], [2], [3]], [[0], [1, 2], [3]], [[3, 0], [1], [2]]):
        columns = ["".join(f"{entry:9.5f}" for entry in gradient(cut, exact=exact)) for exact in (True, False)]
        print(f"{cut!s:<22}", *columns)
