"""Try a trained model: prompts from the command line, a file or a terminal, answered as the tokens come."""

from streamtune.generate.answer import Answer, Answerer, GenerateOptions, load_answerer
from streamtune.generate.prompts import Asked, read_prompts
from streamtune.generate.served import answer_with_vllm, check_served

__all__ = [
    "Answer",
    "Answerer",
    "Asked",
    "GenerateOptions",
    "answer_with_vllm",
    "check_served",
    "load_answerer",
    "read_prompts",
]
