"""Logits of a GGUF file by llama.cpp, token by token, through its plain C interface.

The class `Llama` of llama-cpp-python wants a vocabulary; models without one are read here too.
"""
import ctypes

import llama_cpp as C
import numpy as np

_quiet = C.llama_log_callback(lambda level, text, data: None)
C.llama_log_set(_quiet, ctypes.c_void_p())
C.llama_backend_init()


class Model:
    """An open file; `adapter` is a GGUF adapter to apply."""

    def __init__(self, path, n_ctx=1024, adapter=None, threads=2):
        params = C.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = C.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = C.llama_model_get_vocab(self.model)
        self.n_vocab = C.llama_vocab_n_tokens(self.vocab)
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ctx, n_ctx
        params.n_threads = params.n_threads_batch = threads
        # Its default cache of keys and values has 16 bits, which alone costs 1e-2 of a logit.
        params.type_k = params.type_v = C.GGML_TYPE_F32
        params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = C.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context for {path}")
        if adapter:
            lora = C.llama_adapter_lora_init(self.model, str(adapter).encode())
            if not lora:
                raise RuntimeError(f"llama.cpp cannot load the adapter {adapter}")
            set_lora(self.context, lora)

    def logits(self, ids):
        """(n_tok, n_vocab) for one sequence from its beginning."""
        C.llama_memory_clear(C.llama_get_memory(self.context), True)
        batch = C.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        if C.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        rows = [np.ctypeslib.as_array(C.llama_get_logits_ith(self.context, i), (self.n_vocab,)).copy()
                for i in range(len(ids))]
        C.llama_batch_free(batch)
        return np.stack(rows)

    def tokenize(self, text, special=False):
        data = text.encode()
        room = len(data) + 16
        ids = (C.llama_token * room)()
        n = C.llama_tokenize(self.vocab, data, len(data), ids, room, False, special)
        return list(ids[:n])


def set_lora(context, lora):
    """The call has changed its name and form over time."""
    if hasattr(C, "llama_set_adapters_lora"):
        adapters = (C.llama_adapter_lora_p_ctypes * 1)(lora)
        scales = (ctypes.c_float * 1)(1.0)
        C.llama_set_adapters_lora(context, adapters, 1, scales)
    else:
        C.llama_set_adapter_lora(context, lora, 1.0)
