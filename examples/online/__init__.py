"""The parts of `examples/online_grpo.py`; each file can be replaced by one of your own.

| file            | holds                                                                                          |
|-----------------|------------------------------------------------------------------------------------------------|
| `task.py`       | prompts, worked examples and the checker: three-digit addition                                 |
| `attention.py`  | the core attention of padded rows, cut for context parallelism or with cached keys and values  |
| `policy.py`     | Megatron's GPTModel, its optimizer, a training step, checkpoints                               |
| `sampler.py`    | responses from the current weights, by Megatron's forward pass and its KV cache                |
| `engine.py`     | responses from Megatron's own inference engine, in its place                                   |
| `rows.py`       | rollouts as the padded rows of micro-batches, dealt to data-parallel ranks                     |
| `warm_start.py` | the supervised beginning: until the policy is right now and then                               |
| `report.py`     | a step in numbers; where they go: JSON lines, TensorBoard, wandb, a progress line              |
"""
