# Translation units of the sources in csrc/, by the same rule as setup.py (units.py).
option(DDPX_UNITY "compile several sources as one translation unit" ON)
# No source is compiled twice, and tests and benchmarks run the same code as users.
option(DDPX_PREBUILT "use the objects of scripts/build.py, if they are up to date" OFF)

find_package(Python REQUIRED COMPONENTS Interpreter)

# Adds a library of the units of a group of units.py.
function(ddpx_add_library name type group)
  set(csrc ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  set(arguments ${group})
  if(NOT DDPX_UNITY)
    list(APPEND arguments --alone)
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" ${csrc}/units.py ${arguments}
    OUTPUT_VARIABLE units
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" units "${units}")
  # A longer source may belong to another unit.
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${csrc}/*.cpp)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${csrc}/units.py ${sources})
  ddpx_take_objects(units)
  add_library(${name} ${type} EXCLUDE_FROM_ALL ${units})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()

# Replaces a list of units by their objects, unless a sanitizer is on.
function(ddpx_take_objects list_name)
  set(csrc ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  file(GLOB extensions "${csrc}/../ddpx/_C*.so")
  if(NOT DDPX_PREBUILT OR DDPX_SANITIZE OR NOT extensions)
    return()
  endif()
  file(GLOB_RECURSE all "${csrc}/*.cpp" "${csrc}/*.h")
  foreach(source IN LISTS all)
    foreach(extension IN LISTS extensions)
      if("${source}" IS_NEWER_THAN "${extension}")
        message(STATUS "${source} has changed since the extension was built")
        return()
      endif()
    endforeach()
  endforeach()
  set(objects)
  foreach(unit IN LISTS ${list_name})
    file(RELATIVE_PATH object ${csrc}/.. ${unit})
    string(REGEX REPLACE "\\.cpp$" ".o" object "${csrc}/../build/objects/${object}")
    if(NOT EXISTS "${object}")
      message(STATUS "${object} does not exist")
      return()
    endif()
    list(APPEND objects ${object})
  endforeach()
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT TRUE)
  set(${list_name} ${objects} PARENT_SCOPE)
endfunction()
