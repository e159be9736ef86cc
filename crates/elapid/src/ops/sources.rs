//! The sources of all kernels, for people who want to read them or build on them.
//! (tidy: allow unchecked)

/// Paths below `src/`, and what is in them. A kernel is compiled behind the prelude of its
/// language; some files are parts that others are joined with.
pub fn kernel_sources() -> &'static [(&'static str, &'static str)] {
    macro_rules! sources {
        ($($path:literal,)*) => { &[$(($path, include_str!(concat!("../", $path)))),*] };
    }
    sources![
        "ops/activation.cu",
        "ops/activation.wgsl",
        "ops/adamw.cu",
        "ops/adamw.wgsl",
        "ops/attention/attention.cu",
        "ops/attention/attention.wgsl",
        "ops/attention/cores.cu",
        "ops/attention/step.cu",
        "ops/attention/step.wgsl",
        "ops/balance.cu",
        "ops/balance.wgsl",
        "ops/clamp.cu",
        "ops/clamp.wgsl",
        "ops/conv/conv.cu",
        "ops/conv/conv.wgsl",
        "ops/dispatch.cu",
        "ops/dispatch.wgsl",
        "ops/embedding.cu",
        "ops/embedding.wgsl",
        "ops/gated_norm.cu",
        "ops/gated_norm.wgsl",
        "ops/grad_norm.cu",
        "ops/grad_norm.wgsl",
        "ops/head_loss.cu",
        "ops/head_loss.wgsl",
        "ops/head_loss/teacher.cu",
        "ops/head_loss/teacher.wgsl",
        "ops/largest.cu",
        "ops/largest.wgsl",
        "ops/leaky.cu",
        "ops/leaky.wgsl",
        "ops/linear/linear.cu",
        "ops/linear/linear.wgsl",
        "ops/mamba3/mamba3.cu",
        "ops/mamba3/mamba3.wgsl",
        "ops/mamba3/mamba3_backward.cu",
        "ops/mamba3/mamba3_backward.wgsl",
        "ops/muon.cu",
        "ops/muon.wgsl",
        "ops/norm.cu",
        "ops/norm.wgsl",
        "ops/rank_gate.cu",
        "ops/rank_gate.wgsl",
        "ops/rope.cu",
        "ops/rope.wgsl",
        "ops/router.cu",
        "ops/router.wgsl",
        "ops/row_gate.cu",
        "ops/row_gate.wgsl",
        "ops/scale.cu",
        "ops/scale.wgsl",
        "ops/scan/backward.cu",
        "ops/scan/backward.wgsl",
        "ops/scan/scan.cu",
        "ops/scan/scan.wgsl",
        "ops/scan/step.cu",
        "ops/scan/sums.wgsl",
        "ops/square_error.cu",
        "ops/square_error.wgsl",
        "ops/ssd/cores.cu",
        "ops/ssd/cores_backward.cu",
        "ops/ssd/ssd.cu",
        "ops/ssd/ssd.wgsl",
        "ops/ssd/ssd_backward.cu",
        "ops/ssd/ssd_backward.wgsl",
        "tensor/add.cu",
        "tensor/add.wgsl",
        "tensor/gpu/cast.cu",
        "tensor/gpu/decode.cu",
        "tensor/gpu/decode.wgsl",
        "tensor/gpu/f16.wgsl",
        "tensor/gpu/f16_probe.wgsl",
        "tensor/gpu/formats.cu",
        "tensor/gpu/formats.wgsl",
        "tensor/gpu/halves.wgsl",
        "tensor/gpu/pitch.cu",
        "tensor/gpu/prelude.cu",
        "tensor/gpu/prelude.wgsl",
        "tensor/gpu/product.wgsl",
        "tensor/gpu/product_f32.wgsl",
        "tensor/gpu/subgroups.wgsl",
        "tensor/gpu/subgroups_probe.wgsl",
        "tensor/gpu/sums.wgsl",
        "tensor/gpu/vector.cu",
        "tensor/gpu/vector.wgsl",
        "tensor/gpu/vector_f16.wgsl",
    ]
}

#[cfg(test)]
mod tests {
    use super::kernel_sources;
    use std::path::Path;

    fn visit(dir: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                visit(&path, found);
            } else if path.extension().is_some_and(|it| it == "cu" || it == "wgsl") {
                found.push(path.to_str().unwrap().to_string());
            }
        }
    }

    #[test]
    fn every_kernel_is_listed() {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut found = Vec::new();
        visit(&src, &mut found);
        found.sort();
        let listed: Vec<String> = kernel_sources()
            .iter()
            .map(|(path, _)| src.join(path).to_str().unwrap().to_string())
            .collect();
        assert_eq!(listed, found);
    }
}
