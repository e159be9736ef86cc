// Numbers of a stored matrix, byte by byte; see decode.rs.
// KIND: 0 f32, 1 f16, 2 bf16, then the block formats. BLOCK numbers take BYTES bytes.

@group(0) @binding(0) var<storage, read> words: array<u32>; // the matrix

fn byte(at: u32) -> u32 {
    return (words[at / 4u] >> (at % 4u * 8u)) & 255u;
}

fn signed_byte(at: u32) -> i32 {
    return i32(byte(at) << 24u) >> 24u;
}

// At an even byte.
fn half_bits(at: u32) -> u32 {
    return (words[at / 4u] >> (at % 4u * 8u)) & 65535u;
}

fn half_at(at: u32) -> f32 {
    return f16_to_f32(half_bits(at));
}

// The 6-bit scale and minimum of group `idx` of 8, from 12 bytes.
fn scale_and_min(at: u32, idx: u32) -> vec2<u32> {
    if idx < 4u { return vec2(byte(at + idx) & 63u, byte(at + idx + 4u) & 63u); }
    let low = byte(at + idx + 4u);
    let scale = (low & 15u) | ((byte(at + idx - 4u) >> 6u) << 4u);
    return vec2(scale, (low >> 4u) | ((byte(at + idx) >> 6u) << 4u));
}

// Number i of the block at a byte is `x q - y`.
fn scales(at: u32, i: u32) -> vec2<f32> {
    switch KIND {
        case 3u, 5u, 7u: { return vec2(half_at(at), 0.0); }
        case 4u, 6u: { return vec2(half_at(at), -half_at(at + 2u)); }
        case 8u: {
            let s = byte(at + i / 16u);
            return vec2(half_at(at + 80u) * f32(s & 15u), half_at(at + 82u) * f32(s >> 4u));
        }
        case 9u: {
            let group = i / 16u;
            let low = (byte(at + 96u + group % 8u) >> (group / 8u * 4u)) & 15u;
            let high = (byte(at + 104u + group % 4u) >> (group / 4u * 2u)) & 3u;
            return vec2(half_at(at + 108u) * f32(i32(low | (high << 4u)) - 32), 0.0);
        }
        case 10u, 11u: {
            let s = vec2<f32>(scale_and_min(at + 4u, i / 32u));
            return vec2(half_at(at) * s.x, half_at(at + 2u) * s.y);
        }
        case 12u: {
            return vec2(half_at(at + 208u) * f32(signed_byte(at + 192u + i / 16u)), 0.0);
        }
        default: { return vec2(bitcast<f32>(words[at / 4u]), 0.0); }
    }
}

// Number i of the block at a byte as it is stored, without its scale.
fn quant(at: u32, i: u32) -> f32 {
    switch KIND {
        case 3u: { return f32(i32((byte(at + 2u + i % 16u) >> (i / 16u * 4u)) & 15u) - 8); }
        case 4u: { return f32((byte(at + 4u + i % 16u) >> (i / 16u * 4u)) & 15u); }
        case 5u: {
            let low = (byte(at + 6u + i % 16u) >> (i / 16u * 4u)) & 15u;
            let fifth = (byte(at + 2u + i / 8u) >> (i % 8u)) & 1u;
            return f32(i32(low | (fifth << 4u)) - 16);
        }
        case 6u: {
            let low = (byte(at + 8u + i % 16u) >> (i / 16u * 4u)) & 15u;
            let fifth = (byte(at + 4u + i / 8u) >> (i % 8u)) & 1u;
            return f32(low | (fifth << 4u));
        }
        case 7u: { return f32(signed_byte(at + 2u + i)); }
        case 8u: {
            return f32((byte(at + 16u + i / 128u * 32u + i % 32u) >> (i / 32u % 4u * 2u)) & 3u);
        }
        case 9u: {
            let low = (byte(at + 32u + i / 128u * 32u + i % 32u) >> (i / 32u % 4u * 2u)) & 3u;
            let third = (byte(at + i % 32u) >> (i / 32u)) & 1u;
            return f32(i32(low | (third << 2u)) - 4);
        }
        case 10u: {
            return f32((byte(at + 16u + i / 64u * 32u + i % 32u) >> (i / 32u % 2u * 4u)) & 15u);
        }
        case 11u: {
            let low = (byte(at + 48u + i / 64u * 32u + i % 32u) >> (i / 32u % 2u * 4u)) & 15u;
            let fifth = (byte(at + 16u + i % 32u) >> (i / 32u)) & 1u;
            return f32(low | (fifth << 4u));
        }
        case 12u: {
            let plane = i / 32u % 4u;
            let low = byte(at + i / 128u * 64u + plane % 2u * 32u + i % 32u) >> (plane / 2u * 4u);
            let high = byte(at + 128u + i / 128u * 32u + i % 32u) >> (plane * 2u);
            return f32(i32((low & 15u) | ((high & 3u) << 4u)) - 32);
        }
        default: {
            // The first of two numbers is in the high half.
            var table = array<f32, 16>(
                -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036,
                0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684,
                1.0,
            );
            return table[(byte(at + 4u + i / 2u) >> ((1u - i % 2u) * 4u)) & 15u];
        }
    }
}

// Number i of the row that begins at a byte, in f32, f16 or bf16.
fn number(begin: u32, i: u32) -> f32 {
    if KIND == 0u { return bitcast<f32>(words[begin / 4u + i]); }
    if KIND == 1u { return half_at(begin + 2u * i); }
    return bitcast<f32>(half_bits(begin + 2u * i) << 16u);
}

// Numbers i to i + 3 of the row that begins at a byte; i is a multiple of four.
fn four(begin: u32, i: u32) -> vec4<f32> {
    if KIND == 0u {
        let at = begin / 4u + i;
        return bitcast<vec4<f32>>(vec4(words[at], words[at + 1u], words[at + 2u], words[at + 3u]));
    }
    if KIND <= 2u {
        return vec4(
            number(begin, i), number(begin, i + 1u), number(begin, i + 2u), number(begin, i + 3u)
        );
    }
    // Four numbers share their scales in every format.
    let block = begin + i / BLOCK * BYTES;
    let at = i % BLOCK;
    let s = scales(block, at);
    let low = vec2(quant(block, at), quant(block, at + 1u));
    let high = vec2(quant(block, at + 2u), quant(block, at + 3u));
    return s.x * vec4(low, high) - s.y;
}
