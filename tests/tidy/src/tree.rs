//! A crate as a tree of modules, and what its names mean.
//!
//! Follows `mod` from the root. Modules and items that are for tests alone are left out; of items
//! for different systems all are there.

use crate::mention::is_for_tests;
use std::collections::BTreeSet;
use syn::{Attribute, Item, UseTree, Visibility};

pub struct Module {
    /// Names from the root, which has none.
    pub path: Vec<String>,
    pub file: String,
    pub items: Vec<Item>,
    pub imports: Vec<Import>,
}

/// One name that a `use` brings in.
pub struct Import {
    /// `*` for all names of a module.
    pub name: String,
    pub path: Vec<String>,
    pub line: usize,
    pub is_public: bool,
}

pub struct Crate {
    pub modules: Vec<Module>,
}

/// What a name stands for.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Meaning {
    Module(Vec<String>),
    /// Indices into `Crate::modules` and `Module::items`.
    Item(usize, usize),
    /// Of another crate.
    Foreign(String),
}

impl Crate {
    /// Follows the modules of the file `root`; `read` gives the text of a file that is there.
    pub fn read(root: &str, read: &dyn Fn(&str) -> Option<String>) -> Crate {
        let mut tree = Crate { modules: Vec::new() };
        tree.add_file(Vec::new(), root, read);
        tree
    }

    fn add_file(&mut self, path: Vec<String>, file: &str, read: &dyn Fn(&str) -> Option<String>) {
        let text = read(file).unwrap_or_else(|| panic!("{file} is missing"));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        if !parsed.attrs.iter().any(is_for_tests) {
            self.add(path, file, parsed.items, read);
        }
    }

    fn add(
        &mut self,
        path: Vec<String>,
        file: &str,
        mut items: Vec<Item>,
        read: &dyn Fn(&str) -> Option<String>,
    ) {
        items.retain(|item| !attributes(item).iter().any(is_for_tests));
        let mut children = Vec::new();
        for item in &mut items {
            let Item::Mod(module) = item else { continue };
            let path = [&path[..], &[name_of(&module.ident)]].concat();
            let content = module.content.take().map(|content| content.1);
            children.push((path, content, named_file(&module.attrs)));
        }
        let imports = items.iter().flat_map(imports).collect();
        self.modules.push(Module { path, file: file.to_string(), items, imports });
        for (path, content, named) in children {
            match content {
                Some(items) => self.add(path, file, items, read),
                None => {
                    let child = module_file(file, &path[path.len() - 1], named, read);
                    self.add_file(path, &child, read);
                }
            }
        }
    }

    /// Names of the modules right below the root, in order.
    pub fn top_modules(&self) -> BTreeSet<&str> {
        let below = self.modules.iter().filter(|module| module.path.len() == 1);
        below.map(|module| module.path[0].as_str()).collect()
    }

    pub fn modules_at(&self, path: &[String]) -> impl Iterator<Item = (usize, &Module)> {
        self.modules.iter().enumerate().filter(move |(_, module)| module.path == path)
    }

    /// What `path` means in the module at `from`: several things if types, functions or modules
    /// share the name, nothing if it is a variant or unknown.
    pub fn resolve(&self, from: &[String], path: &[String]) -> Vec<Meaning> {
        self.follow(from, path, &mut BTreeSet::new())
    }

    fn follow(
        &self,
        from: &[String],
        path: &[String],
        seen: &mut BTreeSet<(Vec<String>, String)>,
    ) -> Vec<Meaning> {
        let parent = |of: &[String]| Meaning::Module(of[..of.len().saturating_sub(1)].to_vec());
        let mut found = match path[0].as_str() {
            "crate" => vec![Meaning::Module(Vec::new())],
            "self" => vec![Meaning::Module(from.to_vec())],
            "super" => vec![parent(from)],
            name => self.look_up(from, name, seen),
        };
        if found.is_empty() {
            return vec![Meaning::Foreign(path.join("::"))];
        }
        for name in &path[1..] {
            let step = |meaning: Meaning| match (meaning, name.as_str()) {
                (Meaning::Module(at), "super") => vec![parent(&at)],
                (Meaning::Module(at), name) => self.look_up(&at, name, seen),
                (Meaning::Foreign(start), name) => {
                    vec![Meaning::Foreign(format!("{start}::{name}"))]
                }
                (Meaning::Item(..), _) => Vec::new(),
            };
            found = found.into_iter().flat_map(step).collect();
        }
        found
    }

    fn look_up(
        &self,
        at: &[String],
        name: &str,
        seen: &mut BTreeSet<(Vec<String>, String)>,
    ) -> Vec<Meaning> {
        let mut found = BTreeSet::new();
        for (idx, module) in self.modules_at(at) {
            for (item_idx, item) in module.items.iter().enumerate() {
                match item {
                    Item::Mod(child) if child.ident == name => {
                        found.insert(Meaning::Module([at, &[name.to_string()]].concat()));
                    }
                    item if name_and_kind(item).is_some_and(|pair| pair.0 == name) => {
                        found.insert(Meaning::Item(idx, item_idx));
                    }
                    _ => {}
                }
            }
        }
        // `mod add; use add::add;` asks for `add` again: that time only the module is meant.
        if !seen.insert((at.to_vec(), name.to_string())) {
            return found.into_iter().collect();
        }
        for (_, module) in self.modules_at(at) {
            for import in module.imports.iter().filter(|import| import.name == name) {
                found.extend(self.follow(at, &import.path, seen));
            }
        }
        if found.is_empty() {
            for (_, module) in self.modules_at(at) {
                for import in module.imports.iter().filter(|import| import.name == "*") {
                    for target in self.follow(at, &import.path[..import.path.len() - 1], seen) {
                        if let Meaning::Module(target) = target {
                            found.extend(self.look_up(&target, name, seen));
                        }
                    }
                }
            }
        }
        seen.remove(&(at.to_vec(), name.to_string()));
        found.into_iter().collect()
    }
}

pub fn name_of(ident: &proc_macro2::Ident) -> String {
    ident.to_string().trim_start_matches("r#").to_string()
}

/// Of what can be public and is no module.
pub fn name_and_kind(item: &Item) -> Option<(String, &'static str)> {
    let (ident, kind) = match item {
        Item::Const(item) => (&item.ident, "const"),
        Item::Enum(item) => (&item.ident, "enum"),
        Item::Fn(item) => (&item.sig.ident, "fn"),
        Item::Static(item) => (&item.ident, "static"),
        Item::Struct(item) => (&item.ident, "struct"),
        Item::Trait(item) => (&item.ident, "trait"),
        Item::TraitAlias(item) => (&item.ident, "trait"),
        Item::Type(item) => (&item.ident, "type"),
        Item::Union(item) => (&item.ident, "union"),
        Item::Macro(item) => (item.ident.as_ref()?, "macro"),
        _ => return None,
    };
    Some((name_of(ident), kind))
}

pub fn is_public(item: &Item) -> bool {
    let visibility = match item {
        Item::Const(item) => &item.vis,
        Item::Enum(item) => &item.vis,
        Item::Fn(item) => &item.vis,
        Item::Mod(item) => &item.vis,
        Item::Static(item) => &item.vis,
        Item::Struct(item) => &item.vis,
        Item::Trait(item) => &item.vis,
        Item::TraitAlias(item) => &item.vis,
        Item::Type(item) => &item.vis,
        Item::Union(item) => &item.vis,
        Item::Use(item) => &item.vis,
        _ => return false,
    };
    matches!(visibility, Visibility::Public(_))
}

pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn imports(item: &Item) -> Vec<Import> {
    let Item::Use(item_use) = item else { return Vec::new() };
    let line = item_use.use_token.span.start().line;
    let mut list = Vec::new();
    flatten(&item_use.tree, &mut Vec::new(), &mut |name, path| {
        list.push(Import { name, path: path.to_vec(), line, is_public: is_public(item) });
    });
    list
}

fn flatten(tree: &UseTree, prefix: &mut Vec<String>, add: &mut dyn FnMut(String, &[String])) {
    let mut leaf = |name: String, new_name: String, prefix: &mut Vec<String>| {
        if name == "self" && !prefix.is_empty() {
            let own = prefix[prefix.len() - 1].clone();
            add(if new_name == "self" { own } else { new_name }, prefix);
        } else {
            prefix.push(name);
            add(new_name, prefix);
            prefix.pop();
        }
    };
    match tree {
        UseTree::Path(path) => {
            prefix.push(name_of(&path.ident));
            flatten(&path.tree, prefix, add);
            prefix.pop();
        }
        UseTree::Name(name) => leaf(name_of(&name.ident), name_of(&name.ident), prefix),
        UseTree::Rename(name) => leaf(name_of(&name.ident), name_of(&name.rename), prefix),
        UseTree::Glob(_) => leaf("*".to_string(), "*".to_string(), prefix),
        UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, prefix, add);
            }
        }
    }
}

/// The file of `#[path = "..."]`.
fn named_file(attributes: &[Attribute]) -> Option<String> {
    let value = attributes.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => Some(&pair.value),
        _ => None,
    });
    match value {
        Some(syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. })) => Some(text.value()),
        _ => None,
    }
}

/// The file of `mod name;` in the file `parent`.
fn module_file(
    parent: &str,
    name: &str,
    named: Option<String>,
    read: &dyn Fn(&str) -> Option<String>,
) -> String {
    let (folder, own) = parent.rsplit_once('/').unwrap_or(("", parent));
    if let Some(named) = named {
        return format!("{folder}/{named}");
    }
    let folder = match own {
        "lib.rs" | "main.rs" | "mod.rs" => folder.to_string(),
        own => format!("{folder}/{}", own.trim_end_matches(".rs")),
    };
    let flat = format!("{folder}/{name}.rs");
    if read(&flat).is_some() { flat } else { format!("{folder}/{name}/mod.rs") }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A crate of files given as path and text.
    pub fn of(files: &[(&str, &str)]) -> Crate {
        let read = |path: &str| {
            let file = files.iter().find(|file| file.0 == path);
            file.map(|file| file.1.to_string())
        };
        Crate::read("src/lib.rs", &read)
    }

    #[test]
    fn follows_modules_into_their_files() {
        let tree = of(&[
            ("src/lib.rs", "mod a; mod b { pub mod c {} } #[cfg(test)] mod tests;"),
            ("src/a.rs", "mod d; #[path = \"other.rs\"] mod e;"),
            ("src/a/d/mod.rs", "mod f;"),
            ("src/a/d/f.rs", ""),
            ("src/other.rs", "#![cfg(test)] mod g;"),
        ]);
        let paths: Vec<String> = tree.modules.iter().map(|module| module.path.join("::")).collect();
        assert_eq!(paths, ["", "a", "a::d", "a::d::f", "b", "b::c"]);
        assert_eq!(tree.modules[3].file, "src/a/d/f.rs");
    }

    #[test]
    fn resolves_names_through_imports() {
        let tree = of(&[
            (
                "src/lib.rs",
                "mod add; pub use add::add; mod b { use super::*; use half::f16 as h; }",
            ),
            ("src/add.rs", "pub fn add() {} pub struct S;"),
        ]);
        let meaning = |at: &str, path: &str| {
            let list = |text: &str| -> Vec<String> {
                text.split("::").filter(|name| !name.is_empty()).map(str::to_string).collect()
            };
            let name = |meaning| match meaning {
                Meaning::Module(path) => format!("mod {}", path.join("::")),
                Meaning::Item(module, item) => {
                    let module = &tree.modules[module];
                    let (name, kind) = name_and_kind(&module.items[item]).unwrap();
                    format!("{kind} {}::{name}", module.path.join("::"))
                }
                Meaning::Foreign(path) => format!("other {path}"),
            };
            tree.resolve(&list(at), &list(path)).into_iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(meaning("", "add"), ["mod add", "fn add::add"]);
        assert_eq!(meaning("b", "add::S"), ["struct add::S"]);
        assert_eq!(meaning("b", "super::add::S"), ["struct add::S"]);
        assert_eq!(meaning("b", "h"), ["other half::f16"]);
        assert_eq!(meaning("b", "nobody::x"), ["other nobody::x"]);
    }
}
