//! What a config.json means where it is silent, and which ones are refused.

use crate::model::Model;
use crate::model::config::{Config, FAMILIES, FeedForwardConfig, Mamba2Config, MixerConfig};
use serde_json::{Value, json};
use std::path::PathBuf;

/// The config of a golden set.
fn set(name: &str) -> Value {
    let sets = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden/sets");
    let text = std::fs::read_to_string(sets.join(name).join("config.json")).unwrap();
    serde_json::from_str(&text.replace("Infinity", "{\"__float__\": \"Infinity\"}")).unwrap()
}

/// A config of ours with a layer of each kind.
fn own() -> Value {
    json!({
        "model_type": "elapid", "vocab_size": 40, "d_model": 16,
        "layers": ["mamba1", {"mixer": "mamba2", "feed_forward": "experts"}, "attention",
                   {"mixer": "short_conv", "feed_forward": "none"}],
        "mamba2": {"d_head": 8, "n_group": 2}, "attention": {"n_head": 2}
    })
}

/// `config` with values at dotted paths.
fn with(mut config: Value, changes: &[(&str, Value)]) -> Value {
    for (path, value) in changes {
        let mut at = &mut config;
        for key in path.split('.') {
            at = &mut at[key];
        }
        *at = value.clone();
    }
    config
}

fn without(mut config: Value, keys: &[&str]) -> Value {
    for key in keys {
        config.as_object_mut().unwrap().remove(*key);
    }
    config
}

fn read(config: &Value) -> Config {
    Config::from_json("config.json", &config.to_string()).unwrap()
}

fn refusal(config: &Value) -> String {
    let text = match Config::from_json("config.json", &config.to_string()) {
        Ok(_) => panic!("accepted: {config}"),
        Err(error) => error.report(),
    };
    assert!(!text.ends_with("hint: "), "{text}");
    text
}

fn mamba2(config: &Config) -> &Mamba2Config {
    let found = config.layers.iter().find_map(|layer| match &layer.mixer {
        MixerConfig::Mamba2(c) | MixerConfig::Parallel(c, _) => Some(c),
        _ => None,
    });
    found.unwrap()
}

/// The window of each layer that has attention.
fn windows(config: &Config) -> Vec<Option<usize>> {
    let window = |mixer: &MixerConfig| match mixer {
        MixerConfig::Attention(c) | MixerConfig::Parallel(_, c) => Some(c.dims.window),
        _ => None,
    };
    config.layers.iter().filter_map(|layer| window(&layer.mixer)).collect()
}

#[test]
fn the_sets_and_our_own_config_are_read() {
    read(&own());
    let sets = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden/sets");
    let mut seen = vec!["elapid".to_string()];
    for entry in std::fs::read_dir(sets).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !name.starts_with("lora") {
            seen.push(read(&set(&name)).family.to_string());
        }
    }
    assert!(FAMILIES.iter().all(|family| seen.iter().any(|name| name == family)), "{seen:?}");
}

#[test]
fn sizes_that_would_take_all_memory_are_refused() {
    let all = [("num_hidden_layers", json!(9000)), ("num_local_experts", json!(128))];
    let text = refusal(&with(set("mixtral"), &all));
    assert!(text.contains("`num_local_experts`: 1152000 in all layers together"), "{text}");
    for (name, key, value, part) in [
        ("mixtral", "num_local_experts", 4097, "4097 is out of range 1..=4096"),
        ("olmoe", "num_experts", 4097, "4097 is out of range"),
        ("dots1", "n_routed_experts", 8192, "8192 is out of range"),
        ("llama_headdim", "head_dim", 16386, "16386 is out of range 1..=16384"),
        ("llama_headdim", "num_hidden_layers", 10001, "10001 is out of range"),
        ("mamba", "conv_kernel", 1025, "1025 is out of range 1..=1024"),
        ("mamba2", "conv_kernel", 1025, "1025 is out of range 1..=1024"),
        ("jamba", "mamba_d_conv", 1025, "1025 is out of range 1..=1024"),
        ("mamba", "intermediate_size", 1 << 25, "33554432 is out of range"),
        ("bamba", "mamba_d_state", 1 << 25, "33554432 is out of range"),
    ] {
        let text = refusal(&with(set(name), &[(key, json!(value))]));
        assert!(text.contains(&format!("`{key}`: {part}")), "{name}: {text}");
    }
    let text = refusal(&with(own(), &[("mamba1.d_conv", json!(2000))]));
    assert!(text.contains("`mamba1.d_conv`: 2000 is out of range"), "{text}");
    let text = refusal(&with(own(), &[("short_conv.d_conv", json!(2000))]));
    assert!(text.contains("`short_conv.d_conv`: 2000 is out of range"), "{text}");
}

#[test]
fn a_parameter_of_more_than_2_to_the_40_numbers_is_refused() {
    let wide = 1u64 << 28;
    let most = 1u64 << 24;
    for (name, changes, key) in [
        ("llama_headdim", vec![("vocab_size", wide), ("hidden_size", wide)], "vocab_size"),
        (
            "llama_headdim",
            vec![("hidden_size", 1 << 20), ("intermediate_size", most)],
            "intermediate_size",
        ),
        (
            "llama_headdim",
            vec![("num_attention_heads", most), ("head_dim", 1 << 14)],
            "num_attention_heads",
        ),
        ("mamba", vec![("hidden_size", 1 << 20), ("intermediate_size", most)], "intermediate_size"),
        ("mamba", vec![("intermediate_size", most), ("time_step_rank", most)], "state_size"),
        ("bamba", vec![("mamba_d_state", most), ("mamba_n_groups", most)], "mamba_n_heads"),
        (
            "granitemoehybrid",
            vec![("num_local_experts", 4096), ("intermediate_size", most)],
            "intermediate_size",
        ),
    ] {
        let changes: Vec<_> = changes.into_iter().map(|(key, n)| (key, json!(n))).collect();
        let text = refusal(&with(set(name), &changes));
        assert!(text.contains(&format!("`{key}`: asks for a tensor of [")), "{name}: {text}");
    }
}

#[test]
fn more_states_than_kernels_hold_are_refused() {
    let text = refusal(&with(set("mamba"), &[("state_size", json!(257))]));
    assert!(text.contains("`state_size`: 257 is out of range 1..=256"), "{text}");
}

#[test]
fn a_product_that_does_not_fit_a_word_is_refused() {
    let huge = json!(1u64 << 40);
    let mamba = without(set("mamba"), &["intermediate_size"]);
    let text = refusal(&with(mamba, &[("expand", huge.clone())]));
    assert!(text.contains("`intermediate_size`: 21990232555520 is out of range"), "{text}");
    for name in ["mamba", "falcon_mamba", "mamba2", "jamba", "bamba", "falcon_h1_plain"] {
        let config = match name {
            "mamba" | "falcon_mamba" => without(set(name), &["intermediate_size"]),
            _ => set(name),
        };
        let keys = ["hidden_size", "expand", "mamba_expand"];
        refusal(&with(config, &keys.map(|key| (key, huge.clone()))));
    }
    let changes = [("moe_intermediate_size", huge.clone()), ("n_shared_experts", huge)];
    refusal(&with(set("dots1"), &changes));
}

#[test]
fn the_gated_norm_has_the_groups_of_the_reference() {
    for (name, key, want) in [
        ("bamba", "mamba_n_groups", 1),
        ("granitemoehybrid", "mamba_n_groups", 1),
        ("mamba2", "n_groups", 2),
        ("falcon_h1", "mamba_n_groups", 2),
    ] {
        let config = read(&with(set(name), &[(key, json!(2))]));
        let block = mamba2(&config);
        assert_eq!((block.n_group, block.norm.unwrap().n_group), (2, want), "{name}");
    }
    assert_eq!(mamba2(&read(&own())).norm.unwrap().n_group, 2);
}

#[test]
fn absent_keys_mean_what_the_classes_of_transformers_say() {
    let n_kv = |name: &str, n_head: usize, value: Option<Value>| {
        let sizes = [("num_attention_heads", n_head), ("hidden_size", n_head * 4)];
        let sizes = sizes.map(|(key, n)| (key, json!(n)));
        let mut config = without(with(set(name), &sizes), &["num_key_value_heads"]);
        let d_inner = n_head * 8;
        config = with(config, &[("mamba_n_heads", json!(d_inner / 8)), ("mamba_d_head", json!(8))]);
        config = with(config, &[("mamba_n_groups", json!(1)), ("mamba_d_ssm", json!(d_inner))]);
        if let Some(value) = value {
            config["num_key_value_heads"] = value;
        }
        let config = read(&config);
        let found = config.layers.iter().find_map(|layer| match &layer.mixer {
            MixerConfig::Attention(c) | MixerConfig::Parallel(_, c) => Some(c.dims.n_kv_head),
            _ => None,
        });
        found.unwrap()
    };
    for (name, want) in [
        ("llama_gqa_untied", 64),
        ("olmoe", 64),
        ("granitemoehybrid", 64),
        ("mistral", 8),
        ("mixtral", 8),
        ("jamba", 8),
        ("bamba", 8),
        ("falcon_h1", 8),
        ("qwen2", 32),
        ("qwen3", 32),
        ("dots1", 32),
        ("qwen2_moe", 16),
    ] {
        assert_eq!(n_kv(name, 64, None), want, "{name}");
        assert_eq!(n_kv(name, 64, Some(Value::Null)), 64, "{name}");
    }

    let numbers = |name: &str, keys: &[&str]| {
        let config = read(&without(set(name), keys));
        (config.eps, config.balance_scale, config.tied, config.init_std)
    };
    let keys = [
        "rms_norm_eps",
        "layer_norm_epsilon",
        "router_aux_loss_coef",
        "tie_word_embeddings",
        "initializer_range",
    ];
    for (name, eps, balance, tied, std) in [
        ("mamba", 1e-5, 0.0, true, 0.1),
        ("falcon_mamba", 1e-5, 0.0, true, 0.1),
        ("mamba2", 1e-5, 0.0, false, 0.1),
        ("mamba3_fla", 1e-5, 0.0, false, 0.02),
        ("llama_gqa_untied", 1e-6, 0.0, false, 0.02),
        ("mistral", 1e-6, 0.0, false, 0.02),
        ("qwen2", 1e-6, 0.0, false, 0.02),
        ("qwen3", 1e-6, 0.0, false, 0.02),
        ("mixtral", 1e-5, 0.001, false, 0.02),
        ("qwen2_moe", 1e-6, 0.001, false, 0.02),
        ("olmoe", 1e-5, 0.01, false, 0.02),
        ("dots1", 1e-6, 0.0, false, 0.02),
        ("jamba", 1e-6, 0.001, false, 0.02),
        ("bamba", 1e-5, 0.0, false, 0.02),
        ("granitemoehybrid", 1e-6, 0.001, false, 0.02),
        ("falcon_h1", 1e-5, 0.0, false, 0.02),
    ] {
        assert_eq!(numbers(name, &keys), (eps, balance, tied, std), "{name}");
    }
}

#[test]
fn absent_rope_bases_and_mamba_widths_mean_what_the_classes_say() {
    for (name, want) in [
        ("llama_gqa_untied", 1e4),
        ("mistral", 1e4),
        ("qwen2", 1e4),
        ("mixtral", 1e6),
        ("dots1", 1e4),
        ("falcon_h1", 1e5),
    ] {
        let config = read(&without(set(name), &["rope_theta"]));
        let (MixerConfig::Attention(c) | MixerConfig::Parallel(_, c)) = &config.layers[0].mixer
        else {
            panic!("{name} begins with another mixer")
        };
        assert_eq!(c.rope.as_ref().unwrap().base, want, "{name}");
    }
    let heads = [("mamba_n_heads", json!(32)), ("mamba_d_head", json!("auto"))];
    let config = without(with(set("falcon_h1"), &heads), &["mamba_d_ssm"]);
    assert_eq!(mamba2(&read(&config)).d_inner(), 1024);
    let config = with(set("falcon_h1_plain"), &[("mamba_d_ssm", Value::Null)]);
    assert_eq!(mamba2(&read(&config)).d_inner(), 32);
    let wide = [("hidden_size", json!(64)), ("num_heads", json!(16)), ("head_dim", json!(8))];
    let config = without(with(set("mamba2"), &wide), &["n_groups", "state_size"]);
    let config = read(&config);
    assert_eq!((mamba2(&config).n_group, mamba2(&config).d_state), (8, 128));
    for key in ["n_routed_experts", "num_experts_per_tok"] {
        let text = refusal(&without(set("dots1"), &[key]));
        assert!(text.contains(&format!("`{key}`: is missing")), "{text}");
    }
}

#[test]
fn windows_are_where_the_classes_of_transformers_put_them() {
    let all = |window: Option<usize>| vec![window; 4];
    let mistral = without(set("mistral"), &["sliding_window"]);
    assert_eq!(windows(&read(&mistral)), all(Some(4096)));
    let null = [("sliding_window", Value::Null)];
    assert_eq!(windows(&read(&with(mistral, &null))), all(None));
    assert_eq!(windows(&read(&without(set("mixtral"), &["sliding_window"]))), all(None));

    let sliding = |name: &str, n_max: usize| {
        let config = without(set(name), &["layer_types", "sliding_window"]);
        let on = [("use_sliding_window", json!(true)), ("max_window_layers", json!(n_max))];
        with(config, &on)
    };
    let (some, none) = (Some(4096), None);
    for name in ["qwen2", "qwen3", "dots1"] {
        assert_eq!(windows(&read(&sliding(name, 2))), [none, none, some, some], "{name}");
    }
    assert_eq!(windows(&read(&sliding("qwen2_moe", 3))), [some, none, some, none]);
    assert_eq!(windows(&read(&with(sliding("qwen2_moe", 3), &null))), all(None));

    let deep = |name: &str| {
        let config = without(sliding(name, 0), &["max_window_layers"]);
        let config = read(&with(config, &[("num_hidden_layers", json!(64))]));
        windows(&config).iter().take_while(|window| window.is_none()).count()
    };
    assert_eq!([deep("qwen2"), deep("qwen3"), deep("dots1")], [28, 28, 62]);
    assert_eq!(read(&without(set("qwen2_window"), &["layer_types"])), read(&set("qwen2_window")));
}

#[test]
fn layer_types_must_name_every_layer() {
    let few = [("layer_types", json!(["mamba", "attention", "mamba"]))];
    let text = refusal(&with(set("granitemoehybrid"), &few));
    assert!(text.contains("`layer_types`: holds 3, none for layer 3"), "{text}");
    let on = [("use_sliding_window", json!(true)), ("layer_types", json!(["full_attention"]))];
    let text = refusal(&with(set("qwen2"), &on));
    assert!(text.contains("`layer_types`: holds 1, none for layer 1"), "{text}");
    let config = read(&without(set("granitemoehybrid"), &["layer_types"]));
    assert!(config.layers.iter().all(|layer| matches!(layer.mixer, MixerConfig::Mamba2(_))));
}

#[test]
fn values_that_make_no_model_are_refused_by_key_and_value() {
    let infinity = json!({"__float__": "Infinity"});
    for (name, path, value, part) in [
        ("qwen2_moe", "shared_expert_intermediate_size", json!(0), "0 is out of range"),
        ("granitemoehybrid", "shared_intermediate_size", json!(0), "0 is out of range"),
        ("granitemoehybrid_dense", "shared_intermediate_size", json!(0), "0 is out of range"),
        ("dots1", "n_shared_experts", json!(1u64 << 40), "8796093022208 is out of range"),
        ("llama_gqa_untied", "rope_theta", json!(0), "0 is not a finite number above 0"),
        ("llama_gqa_untied", "rope_theta", json!(-5.0), "-5 is not a finite number above 0"),
        ("llama_yarn", "rope_theta", json!(1), "1 does not go with YaRN"),
        ("llama_yarn", "rope_scaling.factor", json!(0), "is 0, not a finite number above 0"),
        ("llama_yarn", "rope_scaling.beta_fast", json!(-1), "is -1, not a finite number"),
        ("llama_yarn", "rope_scaling.mscale", infinity.clone(), "is inf, not finite"),
        ("llama_linear_rope", "rope_scaling.factor", json!(-2), "is -2, not a finite number"),
        ("llama3_rope", "rope_scaling.factor", json!(0), "is 0, not a finite number above 0"),
        ("llama3_rope", "rope_scaling.high_freq_factor", json!(1), "is 1, not above low_freq"),
        ("granitemoehybrid", "logits_scaling", json!(0), "0 is no divisor"),
        ("granitemoehybrid", "embedding_multiplier", infinity.clone(), "inf is not finite"),
        ("granitemoehybrid", "residual_multiplier", infinity.clone(), "inf is not finite"),
        ("falcon_h1", "key_multiplier", infinity.clone(), "inf is not finite"),
        ("llama_gqa_untied", "rms_norm_eps", json!(0), "0 is not a finite number above 0"),
        ("llama_gqa_untied", "rms_norm_eps", json!(-1e-5), "-0.00001 is not a finite number"),
        ("mamba2", "layer_norm_epsilon", infinity.clone(), "inf is not a finite number"),
        ("falcon_mamba", "mixer_rms_eps", json!(0), "0 is not a finite number above 0"),
        ("jamba", "attn_layer_offset", json!(4), "4 is not below the period, 4"),
        ("jamba", "expert_layer_offset", json!(3), "3 is not below the period, 2"),
        ("olmoe", "clip_qkv", json!(0), "0 is not a finite number above 0"),
        ("olmoe", "clip_qkv", json!(-1.5), "-1.5 is not a finite number above 0"),
        ("qwen3", "initializer_range", json!(-0.5), "-0.5 is below 0"),
        ("qwen3", "initializer_range", infinity.clone(), "inf is not finite"),
        ("mamba", "time_step_min", json!(0), "0 is not a finite number above 0"),
        ("mamba", "time_step_max", json!(-1), "-1 is not a finite number above 0"),
        ("mamba2", "time_step_min", json!(0.5), "0.5 is above the largest, 0.1"),
        ("mamba2", "time_step_floor", json!(-1), "-1 is not 0 or above"),
    ] {
        let text = refusal(&with(set(name), &[(path, value)]));
        assert!(text.contains(&format!("`{path}`: {part}")), "{name}: {text}");
    }
    for (path, value, part) in [
        ("eps", json!(0), "0 is not a finite number above 0"),
        ("init_std", json!(-1), "-1 is below 0"),
        ("mamba1.delta_min", json!(1), "1 is above the largest, 0.1"),
        ("mamba2.delta_max", json!(0), "0 is not a finite number above 0"),
        ("mamba2.n_group", json!(3), "3 do not divide 4 heads"),
        ("attention.rope_base", json!(-1), "-1 is not a finite number above 0"),
        ("attention.n_kv_head", json!(3), "3 do not divide 2 heads"),
        ("experts.d_shared", json!(1u64 << 30), "1073741824 is out of range"),
        ("experts.n_used", json!(9), "9 of 8 experts"),
        ("d_model", json!(0), "0 is out of range"),
    ] {
        let text = refusal(&with(own(), &[(path, value)]));
        assert!(text.contains(&format!("`{path}`: {part}")), "{text}");
    }
}

#[test]
fn an_unknown_key_is_an_error_in_a_part_that_no_layer_uses() {
    let plain = json!({"model_type": "elapid", "vocab_size": 8, "d_model": 64,
                       "layers": ["short_conv"], "feed_forward": "none"});
    assert_eq!(read(&plain).layers[0].feed_forward, FeedForwardConfig::None);
    for part in ["mamba1", "mamba2", "mamba3", "attention", "short_conv", "dense", "experts"] {
        let slip = format!("{part}.d_sate");
        let text = refusal(&with(plain.clone(), &[(&slip, json!(3))]));
        assert!(text.contains(&format!("`{slip}`: is unknown; known are ")), "{text}");
        let text = refusal(&with(plain.clone(), &[(part, json!(3))]));
        assert!(text.contains(&format!("`{part}`: is 3, not an object")), "{text}");
    }
}

/// A config as mamba_ssm writes it.
fn official(ssm: Value) -> Value {
    json!({
        "d_model": 768, "d_intermediate": 0, "n_layer": 2, "vocab_size": 50277, "ssm_cfg": ssm,
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": true, "residual_in_fp32": true,
        "fused_add_norm": true, "pad_vocab_size_multiple": 16, "tie_embeddings": true
    })
}

/// Name and shape of each parameter.
fn parameters(config: &Value) -> Vec<(String, Vec<usize>)> {
    let specs = Model::new(read(config)).specs().to_vec();
    specs.into_iter().map(|spec| (spec.stored.name, spec.stored.shape)).collect()
}

#[test]
fn a_config_without_a_model_type_is_that_of_mamba_ssm() {
    // As state-spaces/mamba-130m has it.
    let old = json!({"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {},
        "rms_norm": true, "residual_in_fp32": true, "fused_add_norm": true,
        "pad_vocab_size_multiple": 8});
    let config = read(&old);
    assert_eq!((config.n_vocab, config.layers.len(), config.tied), (50280, 24, true));
    let like = read(&json!({"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24,
        "intermediate_size": 1536, "vocab_size": 50280}));
    assert_eq!(config.layers, like.layers);
    assert_eq!(config.embed_name, "backbone.embedding.weight");
    let config = read(&official(json!({"layer": "Mamba2"})));
    let like = read(&json!({"model_type": "mamba2", "hidden_size": 768, "num_hidden_layers": 2,
        "num_heads": 24, "n_groups": 1, "vocab_size": 50288}));
    assert_eq!((config.n_vocab, &config.layers), (50288, &like.layers));
}

#[test]
fn the_published_mamba_3_models_have_the_shapes_they_are_stored_in() {
    let published = |ssm: Value, d_intermediate: usize| {
        let more = [("d_intermediate", json!(d_intermediate)), ("vocab_size", json!(128_256))];
        parameters(&with(official(ssm), &more))
    };
    let siso = published(json!({"layer": "Mamba3"}), 1536);
    let mimo = published(json!({"layer": "Mamba3", "is_mimo": true}), 1264);
    for (list, name, want) in [
        (&siso, "backbone.embedding.weight", vec![128_256, 768]),
        (&siso, "backbone.layers.0.mixer.in_proj.weight", vec![3432, 768]),
        (&siso, "backbone.layers.0.mixer.B_bias", vec![24, 1, 128]),
        (&siso, "backbone.layers.1.mlp.fc1.weight", vec![3072, 768]),
        (&mimo, "backbone.layers.0.mixer.in_proj.weight", vec![4200, 768]),
        (&mimo, "backbone.layers.0.mixer.mimo_z", vec![24, 4, 64]),
        (&mimo, "backbone.layers.0.mlp.fc1.weight", vec![2560, 768]),
        (&mimo, "backbone.layers.1.norm2.weight", vec![768]),
        (&mimo, "backbone.norm_f.weight", vec![768]),
    ] {
        let found = list.iter().find(|parameter| parameter.0 == name);
        assert_eq!(found.map(|parameter| &parameter.1), Some(&want), "{name}");
    }
    // Without the head, which files hold too: 15 tensors a layer.
    assert_eq!((siso.len(), mimo.len()), (2 * 12 + 2, 2 * 15 + 2));
}

#[test]
fn what_mamba_ssm_would_compute_otherwise_is_refused() {
    let mamba3 = |more: &[(&str, Value)]| with(official(json!({"layer": "Mamba3"})), more);
    let attention = json!({"num_heads": 4, "causal": true});
    let listed = ("attn_layer_idx", json!([1]));
    for (config, want) in [
        (mamba3(&[("rms_norm", json!(false))]), "`rms_norm`: is not true"),
        (mamba3(&[("ssm_cfg", json!(3))]), "`ssm_cfg`: is 3, not an object"),
        (mamba3(&[("ssm_cfg.layer", json!("Mamba4"))]), "known are Mamba1, Mamba2, Mamba3"),
        (mamba3(&[("ssm_cfg.d_state", json!(7))]), "`ssm_cfg.d_state`: 7 is not even"),
        (mamba3(&[("ssm_cfg.d_state", json!(2))]), "`ssm_cfg.d_state`: 0 is out of range"),
        (mamba3(&[("ssm_cfg.headdim", json!(100))]), "heads of 100 do not fill 1536 channels"),
        (mamba3(&[("ssm_cfg.ngroups", json!(5))]), "`ssm_cfg.ngroups`: 5 do not divide 24 heads"),
        (mamba3(&[("ssm_cfg.rope_fraction", json!(0.25))]), "is 0.25, neither 0.5 nor 1"),
        (mamba3(&[("ssm_cfg.A_floor", json!(0))]), "`ssm_cfg.A_floor`: 0 is not a finite number"),
        (mamba3(&[("ssm_cfg.decay", json!("x"))]), "known are heavy_tail, softplus"),
        (mamba3(&[("ssm_cfg.d_ssm", json!(64))]), "`ssm_cfg.d_ssm`"),
        (mamba3(&[("ssm_cfg.D_has_hdim", json!(true))]), "`ssm_cfg.D_has_hdim`: is not false"),
        (mamba3(std::slice::from_ref(&listed)), "`attn_cfg.causal`: is not true"),
        (
            mamba3(&[listed.clone(), ("attn_cfg", json!({"causal": true}))]),
            "`attn_cfg.num_heads`: is missing",
        ),
        (
            mamba3(&[
                listed.clone(),
                ("attn_cfg", attention.clone()),
                ("attn_cfg.d_conv", json!(4)),
            ]),
            "`attn_cfg.d_conv`: is not 0",
        ),
        (
            mamba3(&[
                listed.clone(),
                ("attn_cfg", attention.clone()),
                ("attn_cfg.rotary_emb_interleaved", json!(true)),
            ]),
            "`attn_cfg.rotary_emb_interleaved`: is not false",
        ),
    ] {
        let text = refusal(&config);
        assert!(text.contains(want), "{want}: {text}");
    }
    let config = read(&mamba3(&[listed, ("attn_cfg", attention)]));
    let c = config.layers[1].mixer.attention().unwrap();
    assert_eq!((c.qkv_bias, c.out_bias, c.rope.is_none(), c.dims.n_kv_head), (true, true, true, 4));
}
