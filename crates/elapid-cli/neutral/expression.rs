//! Arithmetic expressions: a tokenizer, a recursive descent parser and an evaluator.

use std::collections::HashMap;
use std::fmt;
use std::iter::Peekable;
use std::str::Chars;

#[derive(Debug, Clone, PartialEq)]
pub enum Token {
    Number(f64),
    Name(String),
    Operator(char),
    Open,
    Close,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Expr {
    Number(f64),
    Variable(String),
    Negate(Box<Expr>),
    Binary { left: Box<Expr>, op: char, right: Box<Expr> },
}

#[derive(Debug, PartialEq)]
pub enum ParseError {
    UnexpectedChar(char),
    UnexpectedToken(Token),
    UnexpectedEnd,
    UnknownVariable(String),
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParseError::UnexpectedChar(c) => write!(f, "unexpected character {c:?}"),
            ParseError::UnexpectedToken(token) => write!(f, "unexpected token {token:?}"),
            ParseError::UnexpectedEnd => write!(f, "the expression ends too early"),
            ParseError::UnknownVariable(name) => write!(f, "no variable is called {name}"),
        }
    }
}

impl std::error::Error for ParseError {}

fn take_while(chars: &mut Peekable<Chars<'_>>, keep: impl Fn(char) -> bool) -> String {
    let mut text = String::new();
    while let Some(c) = chars.next_if(|c| keep(*c)) {
        text.push(c);
    }
    text
}

pub fn tokenize(input: &str) -> Result<Vec<Token>, ParseError> {
    let mut chars = input.chars().peekable();
    let mut tokens = Vec::new();
    while let Some(&c) = chars.peek() {
        match c {
            c if c.is_whitespace() => {
                chars.next();
            }
            '0'..='9' | '.' => {
                let digits = take_while(&mut chars, |c| c.is_ascii_digit() || c == '.');
                let number = digits.parse().map_err(|_| ParseError::UnexpectedChar('.'))?;
                tokens.push(Token::Number(number));
            }
            'a'..='z' | 'A'..='Z' | '_' => {
                let name = take_while(&mut chars, |c| c.is_alphanumeric() || c == '_');
                tokens.push(Token::Name(name));
            }
            '+' | '-' | '*' | '/' | '^' => {
                tokens.push(Token::Operator(c));
                chars.next();
            }
            '(' | ')' => {
                tokens.push(if c == '(' { Token::Open } else { Token::Close });
                chars.next();
            }
            other => return Err(ParseError::UnexpectedChar(other)),
        }
    }
    Ok(tokens)
}

pub struct Parser {
    tokens: Peekable<std::vec::IntoIter<Token>>,
}

impl Parser {
    pub fn parse(input: &str) -> Result<Expr, ParseError> {
        let mut parser = Parser { tokens: tokenize(input)?.into_iter().peekable() };
        let expr = parser.binary(0)?;
        match parser.tokens.next() {
            None => Ok(expr),
            Some(token) => Err(ParseError::UnexpectedToken(token)),
        }
    }

    /// Precedence climbing: operators that bind less tightly than `min` are left to the caller.
    fn binary(&mut self, min: u8) -> Result<Expr, ParseError> {
        let mut left = self.unary()?;
        while let Some(Token::Operator(op)) = self.tokens.peek().cloned() {
            let (level, next) = match op {
                '+' | '-' => (1, 2),
                '*' | '/' => (2, 3),
                _ => (3, 3),
            };
            if level < min {
                break;
            }
            self.tokens.next();
            let right = Box::new(self.binary(next)?);
            left = Expr::Binary { left: Box::new(left), op, right };
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<Expr, ParseError> {
        match self.tokens.next().ok_or(ParseError::UnexpectedEnd)? {
            Token::Number(number) => Ok(Expr::Number(number)),
            Token::Name(name) => Ok(Expr::Variable(name)),
            Token::Operator('-') => Ok(Expr::Negate(Box::new(self.unary()?))),
            Token::Open => {
                let inner = self.binary(0)?;
                match self.tokens.next() {
                    Some(Token::Close) => Ok(inner),
                    Some(token) => Err(ParseError::UnexpectedToken(token)),
                    None => Err(ParseError::UnexpectedEnd),
                }
            }
            token => Err(ParseError::UnexpectedToken(token)),
        }
    }
}

pub fn evaluate(expr: &Expr, variables: &HashMap<String, f64>) -> Result<f64, ParseError> {
    Ok(match expr {
        Expr::Number(number) => *number,
        Expr::Variable(name) => {
            *variables.get(name).ok_or_else(|| ParseError::UnknownVariable(name.clone()))?
        }
        Expr::Negate(inner) => -evaluate(inner, variables)?,
        Expr::Binary { left, op, right } => {
            let (a, b) = (evaluate(left, variables)?, evaluate(right, variables)?);
            match op {
                '+' => a + b,
                '-' => a - b,
                '*' => a * b,
                '/' => a / b,
                _ => a.powf(b),
            }
        }
    })
}
