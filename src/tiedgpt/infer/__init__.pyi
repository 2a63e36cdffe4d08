from tiedgpt.infer.engine import Engine as Engine
from tiedgpt.infer.generation_config import GenerationConfig as GenerationConfig
from tiedgpt.infer.scoring import Scored as Scored
from tiedgpt.infer.sequence import Completion as Completion
from tiedgpt.infer.sequence import Token as Token
from tiedgpt.infer.worker import ClosedError as ClosedError
from tiedgpt.infer.worker import Generation as Generation
from tiedgpt.infer.worker import QueueFullError as QueueFullError
