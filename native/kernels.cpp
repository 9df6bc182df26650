// All kernels for one instruction set. Built several times; MP_ISA names the namespace and the exported table.
#include "attention.h"
#include "linear.h"
#include "probe.h"
#include "rope_write.h"

namespace MP_ISA {

#define MP_BY_TYPE(name, call, type_field)                                  \
    static int name##_any(const call* a) {                                  \
        return a->type_field == MP_BF16 ? name<bf16>(a) : name<float>(a);   \
    }
MP_BY_TYPE(pack, mp_pack, weight->type)
MP_BY_TYPE(embed, mp_embed, weight->type)
MP_BY_TYPE(linear, mp_linear, weight->type)
MP_BY_TYPE(rms_norm, mp_rms_norm, type)
MP_BY_TYPE(rope_write, mp_rope_write, cache->type)
MP_BY_TYPE(attention, mp_attention, cache->type)
MP_BY_TYPE(peak_probe, mp_probe, type)

static int nothing(const void*) { return MP_OK; }

#define MP_TEXT_(x) #x
#define MP_TEXT(x) MP_TEXT_(x)
extern const mp_kernels table;
const mp_kernels table = {MP_TEXT(MP_ISA_NAME), pack_any, embed_any, linear_any, rms_norm_any,
                          rope_write_any, attention_any, read_probe, peak_probe_any, nothing};

}  // namespace MP_ISA
