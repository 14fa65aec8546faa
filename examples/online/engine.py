"""Responses from Megatron's own inference engine: ``--sampler megatron``.

Megatron's static engine also runs on a CPU, unlike its other one. Megatron-core 0.19 calls it deprecated; it needs
tqdm. The engine returns no entropies and no log-prob of the end mark. It draws its own random numbers, so other layouts
draw other responses. The step's losses need none of that: the trainer computes the old log-probs.
"""

from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.inference.utils import InferenceMode
from torch import Tensor

from online.sampler import Responses
from online.task import END, MAX_RESPONSE, VOCABULARY, decode, encode


class _Characters:
    """The task's vocabulary, as Megatron's engine asks for a tokenizer."""

    eod, bos, vocab_size = END, None, len(VOCABULARY)

    def tokenize(self, text: str) -> list[int]:
        return encode(text)

    def detokenize(self, tokens: Any, **unused: Any) -> str:
        return decode(list(tokens))


def sample_with_engine(model: Any, prompts: Tensor, *, seed: int, greedy: bool = False) -> Responses:
    """Sample one response per prompt at temperature 1, or the likeliest tokens. Tensor-parallel ranks share a seed.

    Args:
        model: Megatron's GPTModel, not wrapped.
        prompts: int64 [rows, prompt length].
    """
    rows, prompt_length = prompts.shape
    training = model.training
    cache = StaticInferenceContext(rows, prompt_length + MAX_RESPONSE)
    controller = TextGenerationController(GPTInferenceWrapper(model, cache), _Characters())
    controller.sampling_rng.manual_seed(seed)
    asked = SamplingParams(num_tokens_to_generate=MAX_RESPONSE, temperature=1.0, top_k=1 if greedy else 0)
    try:
        engine = StaticInferenceEngine(controller, max_batch_size=rows, random_seed=seed, legacy=True)
        finished = engine.generate(prompts=[decode(row) for row in prompts.tolist()], sampling_params=asked)
    finally:
        InferenceMode.unset_active()  # the engine leaves it on, and training would take inference's paths
        model.train(training)
    tokens = prompts.new_full((rows, MAX_RESPONSE), END)
    lengths = torch.full_like(prompts[:, 0], MAX_RESPONSE)
    for row, request in enumerate(finished):
        generated = request.generated_tokens[: request.generated_length]  # without the end mark
        tokens[row, : len(generated)] = generated
        lengths[row] = min(len(generated) + 1, MAX_RESPONSE)
    return Responses(tokens, lengths)
