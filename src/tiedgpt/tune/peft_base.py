"""What the PEFT package takes for a model of transformers: a GPT of ours, for adapters on blocks.

    model = peft.get_peft_model(PeftBase(gpt), peft.LoraConfig(task_type="CAUSAL_LM"))
    model(input_ids=ids, labels=ids).loss.backward()
    model.save_pretrained("adapter")             # loads on transformers' GPT-2, too
    gpt = model.merge_and_unload().gpt           # merged

Layers have transformers' names. peft is not imported here, and the GPT knows nothing of it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.weights.formats.transformers import GPT2
from tiedgpt.weights.formats.transformers.writer import describe

REFUSED = (
    "PEFT's adapters are for the blocks here, not for {}: of a tied W PEFT adapts one face and "
    "leaves the other as it is; tiedgpt.tune.lora(model, targets=['wte']) adapts both"
)


class _Fixed(nn.Module):
    """A module whose children are not replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to put an adapter in the place of a child."""
        if isinstance(value, nn.Module) and name in self._modules:
            raise UserError(REFUSED.format(name))
        super().__setattr__(name, value)


class PeftBase(_Fixed):
    """A GPT under transformers' names, which answers as transformers' classes do."""

    gpt: GPT
    """The model; it is changed in place."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        if not isinstance(gpt, GPT):
            raise UserError(f"PeftBase takes a tiedgpt.GPT, got {type(gpt).__name__}")
        self.__dict__["gpt"] = gpt  # its layers are registered below, once
        self.transformer = _Fixed()
        for name, child in gpt.named_children():
            if name == "head":
                self.lm_head = child
            else:
                self.transformer.add_module(name, child)
        self.config = _Config(**describe(gpt) | {"model_type": GPT2.name})

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> SimpleNamespace:
        """Return `.logits` (B, T, V), and with labels (B, T) `.loss` (), as transformers does.

        Labels are shifted here; -100 is not counted. Padding is on the right, where causal
        attention does not see it, so that the mask changes no counted logit.
        """
        unknown = [
            name for name, value in others.items() if value is not None and name not in PLAIN
        ]
        if input_ids is None or unknown:
            raise UserError(
                f"PeftBase computes input_ids and labels, got {', '.join(unknown) or 'no ids'}"
            )
        if attention_mask is not None and bool((attention_mask.diff(dim=-1) > 0).any()):
            raise UserError("the attention mask must be of padding on the right")
        h = self.gpt.body(input_ids)
        loss = None
        if labels is not None:
            shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            loss = self.gpt.head_loss(h.flatten(0, 1), shifted.flatten())
        return SimpleNamespace(loss=loss, logits=self.gpt.logits(h))

    def get_input_embeddings(self) -> nn.Module:
        """Return what reads tokens: PEFT asks, and is then refused by name."""
        return self.gpt.wte

    def prepare_inputs_for_generation(self, *_: Any, **__: Any) -> None:
        """Refuse: generation is the engine's."""
        raise UserError(
            "generate with the GPT inside: Engine(model.merge_and_unload().gpt).generate(...)"
        )


PLAIN = frozenset({"return_dict", "output_attentions", "output_hidden_states", "use_cache"})
"""Arguments of transformers' forward that ask for nothing that is computed here."""


class _Config(SimpleNamespace):
    """config.json as an object, from which PEFT takes the default target modules."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as a dictionary."""
        return dict(vars(self))
