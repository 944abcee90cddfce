"""Tiny models on disk: a saved causal LM with a tokenizer, and a package that holds one as GGUF."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

#: The 256 characters that byte-level BPE writes bytes as, two merges, two control tokens.
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "<s>", "</s>"]
BOS, EOS = 258, 259


def tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, one for "th" and one for "the"; with `bos` it puts `<s>` before every text."""
    vocabulary = {character: i for i, character in enumerate(TOKENS)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if bos:
        from tokenizers.processors import TemplateProcessing

        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def config(**changes) -> LlamaConfig:
    """A Llama small enough for milliseconds, with grouped key heads."""
    return LlamaConfig(
        **{
            "vocab_size": 260,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 96,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "tie_word_embeddings": True,
        }
        | changes
    )


def save(folder: Path, bos: bool = False, **changes) -> Path:
    """A random model and its tokenizer in `folder`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():  # the default 0.02 makes every model predict evenly
            if parameter.dim() > 1:
                parameter.mul_(10)
    model.save_pretrained(folder)
    tokenizer(bos).save_pretrained(folder)
    return folder


def write_gguf(file: Path, model: LlamaForCausalLM) -> None:
    """A Llama and the byte tokenizer as GGUF, the way llama.cpp lays them out."""
    import gguf

    c = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * 258 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    for name, tensor in gguf_tensors(model):
        writer.add_tensor(name, tensor.detach().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: LlamaForCausalLM):
    """Tensors under llama.cpp's names; rows of q and k in its order, which interleaves the halves of a head."""
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    yield "token_embd.weight", model.model.embed_tokens.weight
    yield "output_norm.weight", model.model.norm.weight
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        yield f"blk.{i}.attn_norm.weight", layer.input_layernorm.weight
        yield f"blk.{i}.ffn_norm.weight", layer.post_attention_layernorm.weight
        yield f"blk.{i}.attn_q.weight", interleaved(attention.q_proj.weight, heads)
        yield f"blk.{i}.attn_k.weight", interleaved(attention.k_proj.weight, kv_heads)
        yield f"blk.{i}.attn_v.weight", attention.v_proj.weight
        yield f"blk.{i}.attn_output.weight", attention.o_proj.weight
        yield f"blk.{i}.ffn_gate.weight", mlp.gate_proj.weight
        yield f"blk.{i}.ffn_up.weight", mlp.up_proj.weight
        yield f"blk.{i}.ffn_down.weight", mlp.down_proj.weight


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
