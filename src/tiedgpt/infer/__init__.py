"""Generate text: the engine, its options, and the texts that it returns.

For example:

    from tiedgpt.infer import Engine

    with Engine("runs/my-1") as engine:
        print(engine.generate("Once upon", max_new_tokens=20, temperature=0.8, seed=1).text)
        for token in engine.stream("Once upon"):
            print(token.text, end="")
"""

from typing import TYPE_CHECKING

from tiedgpt.names import lazy_names

if TYPE_CHECKING:
    from tiedgpt.infer.engine import Engine as Engine
    from tiedgpt.infer.generation_config import GenerationConfig as GenerationConfig
    from tiedgpt.infer.scoring import Scored as Scored
    from tiedgpt.infer.sequence import Completion as Completion
    from tiedgpt.infer.sequence import Token as Token
    from tiedgpt.infer.worker import ClosedError as ClosedError
    from tiedgpt.infer.worker import Generation as Generation
    from tiedgpt.infer.worker import QueueFullError as QueueFullError

__getattr__, __dir__ = lazy_names(__name__)
