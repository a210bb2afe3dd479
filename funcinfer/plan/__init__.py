"""What a model on a mesh costs, on paper: memory, collectives, work, and the least time of a step.

Nothing is allocated and no device is needed: one step of each phase runs on meta tensors, for one
rank, under a recorder.

>>> from funcinfer.sharding import Mesh, presets
>>> config = {
...     "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
...     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
...     "intermediate_size": 14336, "max_position_embeddings": 8192,
... }
>>> preset = presets.for_mesh(8, Mesh(dp=2, tp=4))
>>> made = plan(
...     Subject.from_config(config), preset, Setting(find("h200")),
...     batch=16, context=4096, prompts=2, prompt=1024,
... )
>>> made.memory.param_bytes, [s.count for s in made.decode.cost.sent]
(3621265408, [65, 1])
"""

from funcinfer.plan.hardware import HARDWARE, Figure, Hardware, find
from funcinfer.plan.planning import Phase, Plan, Setting, Subject, plan
from funcinfer.plan.report import data, text
from funcinfer.plan.sweep import Sweep, sweep, sweep_data, sweep_text

__all__ = [
    "HARDWARE",
    "Figure",
    "Hardware",
    "Phase",
    "Plan",
    "Setting",
    "Subject",
    "Sweep",
    "data",
    "find",
    "plan",
    "sweep",
    "sweep_data",
    "sweep_text",
    "text",
]
