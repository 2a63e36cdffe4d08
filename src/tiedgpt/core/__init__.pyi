from tiedgpt.core.cache import KVCache as KVCache
from tiedgpt.core.config import GPTConfig as GPTConfig
from tiedgpt.core.embedding import TiedEmbedding as TiedEmbedding
from tiedgpt.core.model import GPT as GPT
