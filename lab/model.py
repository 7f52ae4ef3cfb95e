"""Writes the lab's model: `python lab/model.py DIRECTORY`. Runs in the vLLM environment.

A Llama of 4 layers with random weights from a fixed seed and a byte tokenizer: one ASCII character is one token, so a
prompt's length in tokens is its length in characters. KV cache in float32: 2 (K, V) x 4 layers x 2 heads x 64 x 4
bytes = 4 KiB a token. Prefill of 2,000 tokens costs more than a fetch over a fast link and less than over a slow one.
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<pad>")
SEED = 0


def main(directory: str) -> None:
    """Writes tokenizer and weights to `directory`."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for symbol in SPECIAL:
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2]
    )
    wrapped.chat_template = "{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}assistant: "
    wrapped.save_pretrained(directory)

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        bos_token_id=vocabulary[SPECIAL[0]],
        eos_token_id=vocabulary[SPECIAL[1]],
        pad_token_id=vocabulary[SPECIAL[2]],
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1])
