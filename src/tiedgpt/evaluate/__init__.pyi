from tiedgpt.evaluate.examples import read_examples as read_examples
from tiedgpt.evaluate.examples import score_examples as score_examples
from tiedgpt.evaluate.texts import TextScore as TextScore
from tiedgpt.evaluate.texts import score_text as score_text
