# frozen_string_literal: true

# States and transitions of an object, declared in its class:
#
#   class Order
#     include StateMachine
#
#     state_machine initial: :draft do
#       event :submit, from: :draft, to: :open
#       event :ship, from: :open, to: :shipped, if: :paid?
#       event :cancel, from: %i[draft open], to: :cancelled
#       after(:ship) { |order| order.notify }
#     end
#   end
module StateMachine
  class InvalidTransition < StandardError
    attr_reader :event, :state

    def initialize(event, state)
      @event = event
      @state = state
      super("cannot #{event} while #{state}")
    end
  end

  Transition = Struct.new(:event, :from, :to, :guard, keyword_init: true) do
    def possible?(object)
      return false unless from.include?(object.state)

      case guard
      when nil then true
      when Symbol then object.send(guard)
      else object.instance_exec(&guard)
      end
    end
  end

  class Definition
    attr_reader :initial, :transitions, :hooks

    def initialize(initial)
      @initial = initial
      @transitions = Hash.new { |hash, event| hash[event] = [] }
      @hooks = { before: Hash.new { |h, k| h[k] = [] }, after: Hash.new { |h, k| h[k] = [] } }
    end

    def event(name, from:, to:, **options)
      transitions[name] << Transition.new(
        event: name, from: Array(from), to: to, guard: options[:if]
      )
    end

    def before(event, &block)
      hooks[:before][event] << block
    end

    def after(event, &block)
      hooks[:after][event] << block
    end

    def states
      list = transitions.values.flatten.flat_map { |it| it.from + [it.to] }
      [initial, *list].uniq
    end

    # Graphviz source of all transitions.
    def to_dot
      edges = transitions.values.flatten.flat_map do |transition|
        transition.from.map { |from| "  #{from} -> #{transition.to} [label=#{transition.event}];" }
      end
      ["digraph {", *edges, "}"].join("\n")
    end
  end

  module ClassMethods
    def state_machine(initial: nil, &block)
      return @state_machine unless block

      @state_machine = Definition.new(initial)
      @state_machine.instance_eval(&block)
      define_event_methods
      define_state_methods
    end

    private

    def define_event_methods
      state_machine.transitions.each_key do |event|
        define_method(event) { fire(event) || false }
        define_method("#{event}!") { fire(event) || raise(InvalidTransition.new(event, state)) }
        define_method("can_#{event}?") { !transition_for(event).nil? }
      end
    end

    def define_state_methods
      state_machine.states.each do |name|
        define_method("#{name}?") { state == name }
      end
    end
  end

  def self.included(base)
    base.extend(ClassMethods)
  end

  def state
    @state ||= self.class.state_machine.initial
  end

  def history
    @history ||= []
  end

  private

  def transition_for(event)
    self.class.state_machine.transitions[event].find { |transition| transition.possible?(self) }
  end

  def fire(event)
    transition = transition_for(event)
    return unless transition

    hooks = self.class.state_machine.hooks
    hooks[:before][event].each { |hook| hook.call(self) }
    history << [state, transition.to]
    @state = transition.to
    hooks[:after][event].each { |hook| hook.call(self) }
    state
  end
end
