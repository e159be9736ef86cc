// Numbers of a stored matrix, byte by byte; see decode.rs.
// KIND: 0 f32, 1 f16, 2 bf16, then the block formats. BLOCK numbers take BYTES bytes.

typedef const unsigned char* Bytes;

DEVICE u32 byte(Bytes x, size_t at) { return x[at]; }
DEVICE float half_at(Bytes x, size_t at) { return f16_to_float(*(const u16*)(x + at)); }

// The 6-bit scale and minimum of group `idx` of 8, from 12 bytes.
DEVICE uint2 scale_and_min(Bytes x, size_t at, u32 idx) {
    if (idx < 4) return make_uint2(byte(x, at + idx) & 63, byte(x, at + idx + 4) & 63);
    u32 low = byte(x, at + idx + 4);
    u32 scale = (low & 15) | ((byte(x, at + idx - 4) >> 6) << 4);
    return make_uint2(scale, (low >> 4) | ((byte(x, at + idx) >> 6) << 4));
}

// Number i of the block at a byte is `x q - y`.
DEVICE float2 scales(Bytes x, size_t at, u32 i) {
    switch (KIND) {
    case 3: case 5: case 7: return make_float2(half_at(x, at), 0.0f);
    case 4: case 6: return make_float2(half_at(x, at), -half_at(x, at + 2));
    case 8: {
        u32 s = byte(x, at + i / 16);
        return make_float2(half_at(x, at + 80) * (float)(s & 15),
                           half_at(x, at + 82) * (float)(s >> 4));
    }
    case 9: {
        u32 group = i / 16;
        u32 low = (byte(x, at + 96 + group % 8) >> (group / 8 * 4)) & 15;
        u32 high = (byte(x, at + 104 + group % 4) >> (group / 4 * 2)) & 3;
        return make_float2(half_at(x, at + 108) * (float)((int)(low | (high << 4)) - 32), 0.0f);
    }
    case 10: case 11: {
        uint2 s = scale_and_min(x, at + 4, i / 32);
        return make_float2(half_at(x, at) * (float)s.x, half_at(x, at + 2) * (float)s.y);
    }
    case 12: {
        float s = (float)(signed char)byte(x, at + 192 + i / 16);
        return make_float2(half_at(x, at + 208) * s, 0.0f);
    }
    default: return make_float2(*(const float*)(x + at), 0.0f);
    }
}

// Number i of the block at a byte as it is stored, without its scale.
DEVICE float quant(Bytes x, size_t at, u32 i) {
    switch (KIND) {
    case 3: return (float)((int)((byte(x, at + 2 + i % 16) >> (i / 16 * 4)) & 15) - 8);
    case 4: return (float)((byte(x, at + 4 + i % 16) >> (i / 16 * 4)) & 15);
    case 5: {
        u32 low = (byte(x, at + 6 + i % 16) >> (i / 16 * 4)) & 15;
        u32 fifth = (byte(x, at + 2 + i / 8) >> (i % 8)) & 1;
        return (float)((int)(low | (fifth << 4)) - 16);
    }
    case 6: {
        u32 low = (byte(x, at + 8 + i % 16) >> (i / 16 * 4)) & 15;
        u32 fifth = (byte(x, at + 4 + i / 8) >> (i % 8)) & 1;
        return (float)(low | (fifth << 4));
    }
    case 7: return (float)(signed char)byte(x, at + 2 + i);
    case 8:
        return (float)((byte(x, at + 16 + i / 128 * 32 + i % 32) >> (i / 32 % 4 * 2)) & 3);
    case 9: {
        u32 low = (byte(x, at + 32 + i / 128 * 32 + i % 32) >> (i / 32 % 4 * 2)) & 3;
        u32 third = (byte(x, at + i % 32) >> (i / 32)) & 1;
        return (float)((int)(low | (third << 2)) - 4);
    }
    case 10:
        return (float)((byte(x, at + 16 + i / 64 * 32 + i % 32) >> (i / 32 % 2 * 4)) & 15);
    case 11: {
        u32 low = (byte(x, at + 48 + i / 64 * 32 + i % 32) >> (i / 32 % 2 * 4)) & 15;
        u32 fifth = (byte(x, at + 16 + i % 32) >> (i / 32)) & 1;
        return (float)(low | (fifth << 4));
    }
    case 12: {
        u32 plane = i / 32 % 4;
        u32 low = byte(x, at + i / 128 * 64 + plane % 2 * 32 + i % 32) >> (plane / 2 * 4);
        u32 high = byte(x, at + 128 + i / 128 * 32 + i % 32) >> (plane * 2);
        return (float)((int)((low & 15) | ((high & 3) << 4)) - 32);
    }
    default: {
        // The first of two numbers is in the high half.
        const float table[16] = {
            -1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
            -0.091050036f, 0.0f, 0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f,
            0.562617f, 0.72295684f, 1.0f};
        return table[(byte(x, at + 4 + i / 2) >> ((1 - i % 2) * 4)) & 15];
    }
    }
}

// Number i of a row, in f32, f16 or bf16.
DEVICE float number(Bytes x, size_t i) {
    switch (KIND) {
    case 0: return ((const float*)x)[i];
    case 1: return f16_to_float(((const u16*)x)[i]);
    default: return bf16_to_float(((const u16*)x)[i]);
    }
}

// Numbers i to i + 3 of a row; i is a multiple of four.
DEVICE float4 four(Bytes x, size_t i) {
    if (KIND <= 2) {
        return make_float4(number(x, i), number(x, i + 1), number(x, i + 2), number(x, i + 3));
    }
    // Four numbers share their scales in every format.
    size_t block = i / BLOCK * BYTES;
    u32 at = (u32)(i % BLOCK);
    float2 s = scales(x, block, at);
    return make_float4(__fsub_rn(__fmul_rn(s.x, quant(x, block, at)), s.y),
                       __fsub_rn(__fmul_rn(s.x, quant(x, block, at + 1)), s.y),
                       __fsub_rn(__fmul_rn(s.x, quant(x, block, at + 2)), s.y),
                       __fsub_rn(__fmul_rn(s.x, quant(x, block, at + 3)), s.y));
}
