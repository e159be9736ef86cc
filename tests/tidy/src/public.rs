//! What a program can name of a crate: modules, types, traits, functions, constants and, of types
//! and traits that it can name, methods and associated items.
//!
//! An item counts once, wherever it is re-exported; an item of a private module counts if it is. A
//! re-export from another crate counts as one. Fields, variants and implementations of traits are
//! not counted.

use crate::mention::is_for_tests;
use crate::tree::{Crate, Meaning, attributes, is_public, name_and_kind, name_of};
use std::collections::{BTreeMap, BTreeSet};
use syn::spanned::Spanned;
use syn::{ImplItem, Item, TraitItem, Type, Visibility};

/// The public items of a crate.
#[derive(Default)]
pub struct Public {
    /// Where each is defined, by kind and path.
    pub items: BTreeMap<(&'static str, String), String>,
    walked: BTreeSet<Vec<String>>,
    /// Indices of module and item.
    types: BTreeSet<(usize, usize)>,
}

/// Finds the public items of `tree`.
pub fn public(tree: &Crate) -> Public {
    let mut public = Public::default();
    public.walk(tree, &[]);
    for module in &tree.modules {
        for item in &module.items {
            public.add_methods(tree, &module.path, &module.file, item);
            let is_exported = attributes(item).iter().any(|a| a.path().is_ident("macro_export"));
            if let (true, Some((name, kind))) = (is_exported, name_and_kind(item)) {
                public.add(kind, &[name], &module.file, line_of(item));
            }
        }
    }
    public
}

impl Public {
    fn add(&mut self, kind: &'static str, path: &[String], file: &str, line: usize) {
        self.items.insert((kind, path.join("::")), format!("{file}:{line}"));
    }

    /// All that the module at `path` shows.
    fn walk(&mut self, tree: &Crate, path: &[String]) {
        if !self.walked.insert(path.to_vec()) {
            return;
        }
        for (idx, module) in tree.modules_at(path) {
            for (item_idx, item) in module.items.iter().enumerate().filter(|pair| is_public(pair.1))
            {
                match item {
                    Item::Mod(child) => {
                        let child = [path, &[name_of(&child.ident)]].concat();
                        self.add("mod", &child, &module.file, line_of(item));
                        self.walk(tree, &child);
                    }
                    Item::Use(_) => {}
                    _ => self.add_item(tree, idx, item_idx),
                }
            }
            for import in module.imports.iter().filter(|import| import.is_public) {
                let is_glob = import.name == "*";
                let end = import.path.len() - usize::from(is_glob);
                for meaning in tree.resolve(path, &import.path[..end]) {
                    match meaning {
                        Meaning::Module(target) if is_glob => self.walk(tree, &target),
                        Meaning::Module(target) => {
                            if is_public_module(tree, &target) {
                                self.add("mod", &target, &module.file, import.line);
                                self.walk(tree, &target);
                            }
                        }
                        Meaning::Item(idx, item) => self.add_item(tree, idx, item),
                        Meaning::Foreign(path) => {
                            self.add("use", &[path], &module.file, import.line)
                        }
                    }
                }
            }
        }
    }

    fn add_item(&mut self, tree: &Crate, module_idx: usize, item_idx: usize) {
        let module = &tree.modules[module_idx];
        let item = &module.items[item_idx];
        let Some((name, kind)) = name_and_kind(item).filter(|_| is_public(item)) else { return };
        let path = [&module.path[..], &[name]].concat();
        self.add(kind, &path, &module.file, line_of(item));
        self.types.insert((module_idx, item_idx));
        let Item::Trait(item) = item else { return };
        for item in &item.items {
            let (ident, kind) = match item {
                TraitItem::Const(item) => (&item.ident, "const"),
                TraitItem::Fn(item) => (&item.sig.ident, "fn"),
                TraitItem::Type(item) => (&item.ident, "type"),
                _ => continue,
            };
            let path = [&path[..], &[name_of(ident)]].concat();
            self.add(kind, &path, &module.file, line_of(ident));
        }
    }

    /// Of an `impl` without a trait, if its type is public.
    fn add_methods(&mut self, tree: &Crate, at: &[String], file: &str, item: &Item) {
        let Item::Impl(block) = item else { return };
        let (None, Type::Path(ty)) = (&block.trait_, &*block.self_ty) else { return };
        let names: Vec<_> = ty.path.segments.iter().map(|part| name_of(&part.ident)).collect();
        for meaning in tree.resolve(at, &names) {
            let Meaning::Item(module_idx, item_idx) = meaning else { continue };
            if !self.types.contains(&(module_idx, item_idx)) {
                continue;
            }
            let module = &tree.modules[module_idx];
            let Some((name, _)) = name_and_kind(&module.items[item_idx]) else { continue };
            for item in &block.items {
                let (attrs, vis, ident, kind) = match item {
                    ImplItem::Const(item) => (&item.attrs, &item.vis, &item.ident, "const"),
                    ImplItem::Fn(item) => (&item.attrs, &item.vis, &item.sig.ident, "fn"),
                    ImplItem::Type(item) => (&item.attrs, &item.vis, &item.ident, "type"),
                    _ => continue,
                };
                let is_shown = matches!(vis, Visibility::Public(_));
                if is_shown && !attrs.iter().any(is_for_tests) {
                    let path = [&module.path[..], &[name.clone(), name_of(ident)]].concat();
                    self.add(kind, &path, file, line_of(ident));
                }
            }
        }
    }
}

fn line_of(at: &impl Spanned) -> usize {
    at.span().start().line
}

fn is_public_module(tree: &Crate, path: &[String]) -> bool {
    let Some((name, parent)) = path.split_last() else { return false };
    tree.modules_at(parent).any(|(_, module)| {
        let mut items = module.items.iter();
        items.any(|item| matches!(item, Item::Mod(child) if child.ident == name) && is_public(item))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::of;

    fn listed(files: &[(&str, &str)]) -> Vec<String> {
        let items = public(&of(files)).items.into_iter();
        items.map(|((kind, path), _)| format!("{kind} {path}")).collect()
    }

    const MODULE: &str = "pub struct S { pub field: u8 }\n\
        impl S { pub const C: u8 = 1; pub fn f(&self) {} fn g() {} pub(crate) fn h() {}\n\
            #[cfg(test)] pub fn i() {} }\n\
        impl Clone for S { fn clone(&self) -> S { S } }\n\
        pub trait T { type A; fn j(); }\n\
        pub(crate) fn k() {}\n\
        pub fn l() {}\n\
        #[cfg(test)] pub fn m() {}\n\
        mod inner { use super::S; impl S { pub fn n() {} } pub enum E { X } }";

    #[test]
    fn counts_what_public_modules_show() {
        let list = listed(&[("src/lib.rs", "pub mod a;"), ("src/a.rs", MODULE)]);
        assert_eq!(
            list,
            [
                "const a::S::C",
                "fn a::S::f",
                "fn a::S::n",
                "fn a::T::j",
                "fn a::l",
                "mod a",
                "struct a::S",
                "trait a::T",
                "type a::T::A"
            ]
        );
    }

    #[test]
    fn counts_what_is_re_exported_from_private_modules_once() {
        let none = listed(&[("src/lib.rs", "mod a;"), ("src/a.rs", MODULE)]);
        assert_eq!(none, [""; 0]);
        let root = "mod a; pub use a::S; pub use crate::a::{S as U, l}; pub(crate) use a::T;";
        let list = listed(&[("src/lib.rs", root), ("src/a.rs", MODULE)]);
        assert_eq!(list, ["const a::S::C", "fn a::S::f", "fn a::S::n", "fn a::l", "struct a::S"]);
        let chain = "mod a { pub use b::*; mod b {\n\
                pub struct S; impl S { pub fn f() {} } pub mod c { pub fn g() {} } } }\n\
            pub use a::{S, c}; pub use half::f16;";
        let list = listed(&[("src/lib.rs", chain)]);
        assert_eq!(
            list,
            ["fn a::b::S::f", "fn a::b::c::g", "mod a::b::c", "struct a::b::S", "use half::f16"]
        );
    }
}
