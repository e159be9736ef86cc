//! A short causal convolution as a mixer of its own.

use super::*;

#[derive(Clone, Debug, PartialEq)]
pub struct ShortConvConfig {
    pub prefix: String,
    pub d_conv: usize,
}

pub(super) const OWN: Own = Own {
    name: "short_conv",
    keys: &["d_conv"],
    read: |reader, _, at, _| {
        let (prefix, d_conv) =
            (format!("{at}.mixer"), reader.keys.size_or("short_conv.d_conv", 3)?);
        Ok(MixerConfig::ShortConv(ShortConvConfig { prefix, d_conv }))
    },
};

impl MixerFacts for ShortConvConfig {
    fn summary(&self) -> String {
        format!("short convolution ({} taps)", self.d_conv)
    }

    fn problems(&self, d_model: usize) -> Problems {
        let mut list = sizes(&[("short_conv.d_conv", self.d_conv, D_CONV_MAX)]);
        list.extend(shapes(&[("short_conv.d_conv", &[d_model, self.d_conv])]));
        list
    }

    fn reach(&self) -> Option<usize> {
        Some(self.d_conv.saturating_sub(1))
    }

    fn build(&self, builder: &mut Builder, d_model: usize) -> Box<dyn Mixer> {
        Box::new(ShortConv(builder.conv(&self.prefix, d_model, self.d_conv, true)))
    }
}

struct ShortConv(ConvIds);

impl Mixer for ShortConv {
    fn forward(&self, pass: &Pass, x: &Var, states: States) -> Var {
        pass.conv(x, &self.0, Activation::None, states)
    }
}
